"""The rank pool: runs tests marked `world_size(n)` on n gloo ranks that outlive a test, and the parity helpers."""
