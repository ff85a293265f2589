"""Where documents begin and end inside an instance.

Shapes: `S` tokens of an instance, `D` documents in it.
"""

import numpy as np


def document_lengths(tokens: np.ndarray, eos_token_id: int) -> np.ndarray:
    """Lengths of the documents of one instance.

    An end-of-text token belongs to the document it ends; what follows the last one is a document of its own
    (spec: data.md section 8).

    Args:
        tokens: Token ids, shape (S,), S >= 1.
        eos_token_id: Id that ends a document.

    Returns:
        int32 array of shape (D,), positive, summing to S.
    """
    ends = np.flatnonzero(tokens == eos_token_id) + 1  # (D,) or (D - 1,)
    if ends.size == 0 or ends[-1] != tokens.size:
        ends = np.append(ends, tokens.size)
    return np.diff(ends, prepend=0).astype(np.int32)  # (D,)
