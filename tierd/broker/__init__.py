"""The heart: requests for a layer's experts become ready experts; reads that nobody waits for come after them."""
