"""The node's HTTP side: the APIs that clients of OpenAI and Anthropic speak, metrics, and a page to chat on."""
