"""What a KV cache is: specs, rotations, the cache as a value, compatibility. No transformers."""
