"""What lies on disk: expert records, their index, the manifest, safetensors shards and checksums."""
