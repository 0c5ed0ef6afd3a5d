"""From a model's raw answer to reasoning, content and tool calls: one file per way of writing tool calls."""
