"""How many bytes of text a token of a data set stands for, as the manifests beside its files say."""

from collections.abc import Iterable

from olmo_hf.data.manifest_lookup import recorded


def bytes_per_token_of(paths: Iterable[str]) -> float | None:
    """Bytes of text over tokens, end-of-text tokens counted, of all files together.

    Args:
        paths: token files.

    Returns:
        The ratio, or None when some file has no manifest that says it.
    """
    text_bytes = num_tokens = 0
    for path in paths:
        file = recorded(path)
        if file is None or file.text_bytes is None:
            return None
        text_bytes += file.text_bytes
        num_tokens += file.num_tokens
    return text_bytes / num_tokens if text_bytes and num_tokens else None
