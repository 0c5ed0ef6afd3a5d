"""Between text and token ids: the tokenizer, the streaming decoder and chat templates."""
