"""Conversations as token ids, with labels for the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer.functional.checks import check_choice, check_whole, described
from composer.functional.transformers_loss import IGNORED

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize_chat(
    chat: Mapping[str, Any] | Sequence[Mapping[str, Any]], tokenizer: Any, answers: str = "all", **options: Any
) -> dict[str, Tensor]:
    """Return the token ids of a conversation, with labels only for what the assistant answers.

    If the template of the tokenizer has markers (``{% generation %}``), they state what is an answer. Otherwise an
    answer is the difference between the rendered conversation up to its end, and up to the header after which a model
    generates it. The differences are checked: an error is raised if the template renders these messages differently
    in the complete conversation. Whitespace after the end of an answer is not part of it. As in Transformers, a token
    is labelled if one of its characters is part of an answer.

    The results are documents for ``composer.core.pack_sequences``.

    Args:
        chat: A conversation: ``{"messages": [...]}``, and perhaps ``"tools"``, a list of JSON schemas or functions; or
            the list of messages alone, each with ``"role"`` and ``"content"``. The role of answers is ``"assistant"``.
        tokenizer: A fast tokenizer of Transformers with a chat template.
        answers: ``"all"``, or ``"last"`` for the last message alone, which is found by its difference.
        options: Further arguments of ``tokenizer.apply_chat_template``, such as ``chat_template`` or variables of the
            template.

    Returns:
        ``input_ids`` and ``labels``, int64, shape ``(n,)``. Labels are those of the same position, -100 outside of
        answers.

    Raises:
        TypeError: ``chat`` is no conversation.
        ValueError: There is no answer, or the template renders its beginning differently in the complete conversation.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> backend = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, "hi": 2, "hello": 3, "[END]": 4}))
        >>> backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> template = (
        ...     "{% for one in messages %}{{ one.role + ' ' + one.content + ' [END] ' }}{% endfor %}"
        ...     "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
        ... )
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
        >>> messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        >>> tokenize_chat({"messages": messages}, tokenizer)
        {'input_ids': tensor([0, 2, 4, 1, 3, 4]), 'labels': tensor([-100, -100, -100, -100,    3,    4])}
    """
    check_choice("answers", answers, "all", "last")
    messages = chat.get("messages") if isinstance(chat, Mapping) else chat
    if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise TypeError(
            "chat must be a list of messages with 'role' and 'content', or a dictionary with it under 'messages', got "
            f"{described(chat)}."
        )
    if isinstance(chat, Mapping) and chat.get("tools"):
        options = {"tools": chat["tools"], **options}
    places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
    if not places or (answers == "last" and places[-1] != len(messages) - 1):
        wanted = "end with a message" if answers == "last" else "have a message or more"
        roles = [one["role"] for one in messages]
        raise ValueError(f"chat must {wanted} whose role is 'assistant', got the roles {roles}.")
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    if answers == "all" and _GENERATION.search(template):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
        mask = found["assistant_masks"]
    else:
        text, spans = _answers(messages, places if answers == "all" else places[-1:], tokenizer, options)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [any(start < last and end > first for first, last in spans) for start, end in found["offset_mapping"]]
    ids = torch.tensor(found["input_ids"])
    return {"input_ids": ids, "labels": ids.where(torch.tensor(mask).bool(), IGNORED)}


def _answers(
    messages: Sequence[Mapping[str, Any]], places: Sequence[int], tokenizer: Any, options: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the first and last characters of answers."""

    def render(end: int, **more: bool) -> str:
        text: str = tokenizer.apply_chat_template([*messages[:end]], tokenize=False, **options, **more)
        return text

    if places[0] == 0:
        raise ValueError(
            "chat must not begin with an answer, which has no beginning that can be rendered. Remove messages[0], or "
            "take a template with {% generation %}."
        )
    text, spans = render(len(messages)), []
    for place in places:
        start, end = render(place, add_generation_prompt=True), render(place + 1).rstrip()
        for part in (start, end):
            if not text.startswith(part):
                common = next(place for place, one in enumerate(part) if text[place : place + 1] != one)
                raise ValueError(
                    f"The chat template must render messages[:{place + 1}] alone as in the complete chat, to find the "
                    f"answer messages[{place}], but it renders {part[common : common + 40]!r} instead of "
                    f"{text[common : common + 40]!r}. Set the template's variables (such as enable_thinking=False), "
                    "take one with {% generation %}, or answers='last'."
                )
        spans.append((len(start), len(end)))
    return text, spans


def collate_pairs(pairs: Sequence[Mapping[str, Any]], pad_id: int = 0) -> dict[str, Tensor]:
    """Return a batch of pairs of answers, padded on the right: the ``collate_fn`` of a loader.

    Args:
        pairs: The pairs: dictionaries with ``"chosen"`` and ``"rejected"``, each with ``input_ids`` and ``labels`` as
            :func:`tokenize_chat` returns them; and perhaps ``"reference"``, the log-probabilities of both, shape
            ``(2,)``, as ``composer.models.PreferenceModel.with_reference`` adds them.
        pad_id: The id of the padding.

    Returns:
        ``input_ids``, ``labels`` (-100 at padding) and ``attention_mask``, shape ``(N, 2, L)``, and ``reference``,
        shape ``(N, 2)``; the chosen answer is the first one of each pair. So a pair is a sample, which is not split.

    Raises:
        ValueError: A pair is no dictionary, or lacks an answer, or only some have a reference.

    Example:
        >>> answers = [{"input_ids": ids, "labels": ids} for ids in (torch.tensor([5, 6, 7]), torch.tensor([5, 8]))]
        >>> collate_pairs([{"chosen": answers[0], "rejected": answers[1]}])["input_ids"]
        tensor([[[5, 6, 7],
                 [5, 8, 0]]])
    """
    check_whole("pad_id", pad_id)
    names = {"chosen", "rejected", *({"reference"} & set(pairs[0]))}
    for index, pair in enumerate(pairs):
        if not isinstance(pair, Mapping) or not names <= pair.keys():
            got = sorted(pair) if isinstance(pair, Mapping) else described(pair)
            raise ValueError(f"pairs[{index}] must be a dictionary with {', '.join(sorted(names))}, got {got}.")
    rows = [pair[side] for pair in pairs for side in ("chosen", "rejected")]
    if not all(isinstance(row, Mapping) and {"input_ids", "labels"} <= row.keys() for row in rows):
        given = f"got {described(rows[0])}: tokenize_chat(prompt + answer, tokenizer, answers='last') returns them."
        raise ValueError(f"'chosen' and 'rejected' of pairs must be dictionaries with input_ids and labels, {given}")
    rows = [{**row, "attention_mask": torch.ones(len(row["input_ids"]), dtype=torch.int64)} for row in rows]
    batch = {}
    for name, value in {"input_ids": pad_id, "labels": IGNORED, "attention_mask": 0}.items():
        padded = pad_sequence([torch.as_tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
        batch[name] = padded.view(len(pairs), 2, -1)
    if "reference" in names:
        batch["reference"] = torch.stack([torch.as_tensor(pair["reference"]) for pair in pairs])
    return batch
