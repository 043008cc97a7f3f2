"""The task types of PEFT that are served."""

from __future__ import annotations

CAUSAL_LM, SEQ_CLS, FEATURE_EXTRACTION = "CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION"

SCORE = "score"
"""The head of all served families under `SEQ_CLS`: a linear without bias on the last token."""
SAVED_HEADS = ("classifier", SCORE)
"""Names that PEFT adds to `modules_to_save` for `SEQ_CLS`, whether or not the model has them."""
MAX_LABELS = 65_536
