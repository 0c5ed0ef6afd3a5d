"""How the embedded model was made: text, tokenizer, torch module, training loop and export.

Needs the extra `train` (torch). Nothing else in the project imports this package.
"""

from __future__ import annotations
