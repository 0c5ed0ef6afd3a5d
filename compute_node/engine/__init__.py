"""From token ids to token ids: weights, KV cache, step, sampler, generation, and the executor that runs programs."""
