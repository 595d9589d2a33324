"""What `zinf train` is made of: text, batches, the loop, its records. It uses only zinf's public names."""
