"""The MPI room: one channel interface and its three transports. Nothing heavy is loaded on import."""
