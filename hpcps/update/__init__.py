"""Server-side arithmetic: sums of gradients and optimizers of one shard, in numpy. It knows no transport."""
