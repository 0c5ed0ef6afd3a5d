"""Models of Hugging Face transformers whose routed experts come from tierd (extra `torch`).

    from tierd.integrations.transformers import load
    model = load("/nvme/model", arena="8GiB")

gives an ordinary model: `generate`, pipelines and chat templates work as ever. The routed experts are never allocated:
they are computed on where the daemon keeps them.
"""

from __future__ import annotations

from tierd.integrations.transformers.loading import Tier, attach, load

__all__ = ["Tier", "attach", "load"]
