"""The runtime joins protocol, channel, rules and files. It carries out; it decides nothing."""
