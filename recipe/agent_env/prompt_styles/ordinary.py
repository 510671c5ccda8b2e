# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tokenizer's twin that cannot produce control tokens.

Owns the surgery on a `tokenizers.Tokenizer`; refuses to know pieces and chat formats.
"""

import json

from tokenizers import AddedToken, Tokenizer

from recipe.agent_env.prompt_styles.errors import PromptStyleError


def ordinary_tokenizer(backend: Tokenizer, *, forbidden: list[str], keep: list[AddedToken], border: str) -> Tokenizer:
    """Copy a tokenizer without its control tokens.

    Args:
        backend: The tokenizer to copy; it is left as it is.
        forbidden: Contents of the control tokens. Where the model's own vocabulary lists one, the entry is renamed.
        keep: Added tokens that stay.
        border: Content of one new added token, by which the caller marks where a control token stands.

    Returns:
        A tokenizer with the same normalizer, pre-tokenizer and model. Its added tokens may have other ids.

    Raises:
        PromptStyleError: The model still gives a control token for the text that spells it.
    """
    listed = {content for content in forbidden if backend.model.token_to_id(content) is not None}
    if listed:
        twin = Tokenizer.from_str(_renamed(backend.to_str(), listed, border))
    else:
        twin = Tokenizer(backend.model)
        if backend.normalizer is not None:
            twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
    twin.no_truncation()
    twin.no_padding()
    twin.add_tokens(keep)
    twin.add_special_tokens([AddedToken(border, special=True, normalized=False)])
    _check(twin, backend, forbidden, border)
    return twin


def _renamed(serialized: str, listed: set[str], border: str) -> str:
    """Rename entries of the model's vocabulary to strings that no text can spell, and drop all added tokens."""
    spec = json.loads(serialized)
    model = spec["model"]
    made_by_merges = {"".join(m if isinstance(m, list) else m.split(" ")) for m in model.get("merges", [])}
    kept_names = made_by_merges | {model.get("unk_token")}

    def rename(entry: str) -> str:
        return border + entry if entry in listed and entry not in kept_names else entry

    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {rename(entry): token_id for entry, token_id in vocab.items()}
    else:
        model["vocab"] = [[rename(entry), score] for entry, score in vocab]
    spec["added_tokens"] = []
    return json.dumps(spec, ensure_ascii=False)


def _check(twin: Tokenizer, backend: Tokenizer, forbidden: list[str], border: str) -> None:
    border_id = twin.token_to_id(border)
    if twin.id_to_token(border_id) != border or twin.model.id_to_token(border_id) is not None:
        raise PromptStyleError(f"the tokenizer's vocabulary has gaps: id {border_id} is taken; renumber its entries")
    unknown = getattr(twin.model, "unk_token", None)
    forbidden_ids = {backend.token_to_id(content): content for content in forbidden if content != unknown}
    for encoding in twin.encode_batch(forbidden, add_special_tokens=False):
        for token_id in encoding.ids:
            if token_id in forbidden_ids:
                raise PromptStyleError(
                    f"the tokenizer spells its control token {forbidden_ids[token_id]!r} in ordinary text, so an "
                    "environment could forge it; mark the token as added and keep it out of the merges"
                )
