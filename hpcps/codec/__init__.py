"""Encoding of gradients: a shard's encoder, error feedback around any lossy codec, what each codec costs here."""
