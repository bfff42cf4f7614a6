"""Conversations as token ids, with labels for answers."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from composer import functional as cf

MARKS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<|bos|>"]
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SYSTEM = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
CHATML = (
    SYSTEM
    + "{% for one in messages %}{{ '<|im_start|>' + one.role + '\n' + one.content + '<|im_end|>\n' }}{% endfor %}"
) + HEADER
MARKED = (
    SYSTEM
    + "{% for one in messages %}{{ '<|im_start|>' + one.role + '\n' }}{% if one.role == 'assistant' %}"
    + "{%- generation -%}{{ one.content + '<|im_end|>' }}{%- endgeneration -%}"
    + "{% else %}{{ one.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    + HEADER
)
LLAMA = (
    "{{ '<|bos|>' }}{% for one in messages %}"
    "{{ '<|start|>' + one.role + '<|end|>\n\n' + one.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
PLAIN = (
    "{% for one in messages %}{% if one.role == 'user' %}{{ 'Q: ' + one.content + '\n' }}"
    "{% else %}{{ 'A: ' + one.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
FORGETFUL = (  # as templates that leave out the reasoning of earlier answers
    "{% for one in messages %}{{ '<|im_start|>' + one.role + '\n' }}"
    "{% if one.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ one.content + '<|im_end|>\n' }}{% endfor %}"
) + HEADER
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est-il?"},
    {"role": "assistant", "content": "À Paris, là-bas 🗼."},
    {"role": "user", "content": "Sûr?"},
    {"role": "assistant", "content": "  Oui\n"},
]


def make_tokenizer(template, *, merges=(), trim_offsets=True, use_regex=True):
    """Return a tokenizer of bytes, with marks as tokens and some merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*MARKS, *alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.add_special_tokens(MARKS)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=trim_offsets, use_regex=use_regex
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token="<|bos|>", clean_up_tokenization_spaces=False
    )


def answers_of(document, tokenizer):
    """Return the texts of the labelled runs of tokens, which are the tokens at their positions."""
    ids, labels = document["input_ids"], document["labels"]
    labelled = labels != -100
    assert ids.dtype == labels.dtype == torch.int64
    assert torch.equal(ids[labelled], labels[labelled])
    runs, before = [], False
    for token, is_labelled in zip(ids.tolist(), labelled.tolist(), strict=True):
        if is_labelled:
            runs[-1:] = [[*runs[-1], token]] if before else [*runs[-1:], [token]]
        before = is_labelled
    return [tokenizer.decode(run) for run in runs]


class TestTokenizeChat:
    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            (CHATML, ["À Paris, là-bas 🗼.<|im_end|>", "  Oui\n<|im_end|>"]),
            (MARKED, ["À Paris, là-bas 🗼.<|im_end|>", "  Oui\n<|im_end|>"]),
            (LLAMA, ["À Paris, là-bas 🗼.<|eot|>", "Oui<|eot|>"]),
            (PLAIN, [" À Paris, là-bas 🗼.", "   Oui"]),
        ],
        ids=["ChatML", "markers", "Llama 3", "plain"],
    )
    @pytest.mark.parametrize("trim_offsets", [True, False])
    def test_labels_are_the_answers(self, template, expected, trim_offsets):
        """The labelled tokens are the answers that the template prints, and the ids those of Transformers."""
        tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)

        document = cf.tokenize_chat({"messages": CHAT}, tokenizer)

        assert document["input_ids"].tolist() == tokenizer.apply_chat_template(CHAT, return_dict=False)
        assert answers_of(document, tokenizer) == expected
        assert cf.tokenize_chat(CHAT, tokenizer)["labels"].equal(document["labels"])
        assert answers_of(cf.tokenize_chat(CHAT, tokenizer, answers="last"), tokenizer) == expected[-1:]

    def test_differences_equal_markers(self):
        """Both ways label the same tokens, with tools, and with answers that follow each other."""
        tool = {"role": "tool", "content": "42"}
        messages = [*CHAT, {"role": "assistant", "content": "call()"}, tool, {"role": "assistant", "content": "42!"}]
        chat = {"messages": messages, "tools": [{"type": "function", "function": {"name": "call"}}]}

        found, expected = (cf.tokenize_chat(chat, make_tokenizer(template)) for template in (CHATML, MARKED))

        assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "labels"))
        assert len(answers_of(found, make_tokenizer(CHATML))) == 4
        assert "call" in make_tokenizer(CHATML).decode(found["input_ids"][:80])

    def test_tokens_across_a_border_are_labelled(self):
        """A token that begins in the header and ends in the answer is labelled, with and without markers."""
        messages = [CHAT[1], {"role": "assistant", "content": "\nOui"}]
        tokenizers = [make_tokenizer(one, merges=[("Ċ", "Ċ")], use_regex=False) for one in (CHATML, MARKED)]

        found, marked = (cf.tokenize_chat(messages, one) for one in tokenizers)

        assert answers_of(found, tokenizers[0]) == ["\n\nOui<|im_end|>"]
        assert torch.equal(found["labels"], marked["labels"])

    def test_variables_of_the_template(self):
        """Options reach the template, in the complete conversation and in its parts."""
        template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n' + (hint or '')")

        with pytest.raises(ValueError, match=r"renders 'NO' instead of 'À Paris"):
            cf.tokenize_chat(CHAT, make_tokenizer(template), hint="NO")

        document = cf.tokenize_chat(CHAT, make_tokenizer(None), chat_template=template, hint="")
        assert document["labels"].equal(cf.tokenize_chat(CHAT, make_tokenizer(CHATML))["labels"])

    def test_template_that_changes_earlier_answers(self):
        """An error names the answer that differs in the complete conversation, and the last one can be found."""
        tokenizer = make_tokenizer(FORGETFUL)

        with pytest.raises(ValueError, match=r"messages\[:3\] alone .* renders '<think>.*answers='last'"):
            cf.tokenize_chat(CHAT, tokenizer)

        assert answers_of(cf.tokenize_chat(CHAT, tokenizer, answers="last"), tokenizer) == [
            "<think>\n\n</think>\n\n  Oui\n<|im_end|>"
        ]

    @pytest.mark.parametrize(
        ("chat", "answers", "error", "message"),
        [
            ("hello", "all", TypeError, "chat must be a list of messages"),
            ({"prompt": []}, "all", TypeError, "chat must be a list of messages"),
            ([{"content": "hello"}], "all", TypeError, "chat must be a list of messages"),
            (CHAT[:2], "all", ValueError, r"got the roles \['system', 'user'\]"),
            (CHAT[:4], "last", ValueError, "chat must end with a message"),
            (CHAT[2:], "all", ValueError, "must not begin with an answer"),
            (CHAT, "first", ValueError, "answers must be one of 'all', 'last'"),
        ],
    )
    def test_wrong_chat_raises(self, chat, answers, error, message):
        """What is no conversation with answers raises an error with what was expected."""
        with pytest.raises(error, match=message):
            cf.tokenize_chat(chat, make_tokenizer(CHATML), answers)

    @pytest.mark.parametrize(
        ("name", "is_error"),
        [("cohere", 0), ("gemma3", 0), ("phi3", 0), ("qwen2_5", 0), ("qwen3_vl", 0), ("qwen3", 1), ("deepseekv3", 1)],
    )
    def test_templates_of_published_models(self, name, is_error):
        """On a template of published models, differences label what its variant with markers labels, or raise an error.

        TRL has both. Where whitespace around an answer is labelled differs.
        """
        spec = importlib.util.find_spec("trl")
        if spec is None or not (folder := Path(spec.origin).parent / "chat_templates").exists():
            pytest.skip("TRL has the templates")
        plain, marked = (make_tokenizer((folder / f"{name}{end}.jinja").read_text()) for end in ("", "_training"))
        messages = [*CHAT[1:4], {"role": "assistant", "content": "Oui."}]

        expected = answers_of(cf.tokenize_chat(messages, marked), marked)
        if is_error:
            with pytest.raises(ValueError, match="must render"):
                cf.tokenize_chat(messages, plain)
            return
        found = answers_of(cf.tokenize_chat(messages, plain), plain)

        assert [one.strip() for one in found] == [one.strip() for one in expected]
        assert all(answer["content"] in text for answer, text in zip(messages[1::2], found, strict=True))

    def test_packed_loss_equals_that_of_each_chat(self):
        """The loss of packed chats is that of each alone, weighted by its labels; others change nothing."""
        tokenizer = make_tokenizer(LLAMA)
        chats = [CHAT, CHAT[:3], [CHAT[3], CHAT[4]]]
        documents = [cf.tokenize_chat(chat, tokenizer) for chat in chats]
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), use_cache=False, **sizes)).eval()
        row = cf.pack_documents(
            [one["input_ids"] for one in documents], 400, labels=[one["labels"] for one in documents]
        )
        packed = cf.collate_packed([row])
        names = ("input_ids", "labels", "position_ids")

        loss = model(**{name: packed[name] for name in names}).loss
        alone = [model(**{name: value[None] for name, value in one.items()}).loss for one in documents]

        counts = torch.tensor([(one["labels"][1:] != -100).sum() for one in documents])
        assert counts.tolist() == [
            sum(len(tokenizer.encode(text)) for text in answers_of(one, tokenizer)) for one in documents
        ]
        assert loss.item() == pytest.approx(((torch.stack(alone) * counts).sum() / counts.sum()).item(), rel=1e-5)


class TestCollatePairs:
    def test_pads_both_answers(self):
        """Both answers of a pair are rows of one sample, padded to the longest, with ignored labels."""
        rows = [torch.arange(size) for size in (3, 5, 2, 1)]
        answers = [{"input_ids": row, "labels": row + 10} for row in rows]
        pairs = [{"chosen": answers[0], "rejected": answers[1]}, {"chosen": answers[2], "rejected": answers[3]}]

        batch = cf.collate_pairs(pairs, pad_id=7)

        for place, row in enumerate(rows):
            sample, padding = (place // 2, place % 2), [*range(5 - len(row))]
            assert batch["input_ids"][sample].tolist() == [*row.tolist(), *(7 for _ in padding)]
            assert batch["labels"][sample].tolist() == [*(row + 10).tolist(), *(-100 for _ in padding)]
            assert batch["attention_mask"][sample].tolist() == [1] * len(row) + [0] * len(padding)
        assert batch.keys() == {"input_ids", "labels", "attention_mask"}

    def test_references(self):
        """Cached log-probabilities are stacked, and must be there for all pairs or none."""
        answer = {"input_ids": torch.arange(3), "labels": torch.arange(3)}
        pair = {"chosen": answer, "rejected": answer}
        cached = {**pair, "reference": torch.tensor([-1.0, -2.0])}

        assert cf.collate_pairs([cached, cached])["reference"].tolist() == [[-1, -2], [-1, -2]]
        with pytest.raises(
            ValueError, match=re.escape("pairs[1] must be a dictionary with chosen, reference, rejected")
        ):
            cf.collate_pairs([cached, pair])

    def test_messages_raise(self):
        """Pairs of messages, as data sets of TRL have them, raise an error with the function that tokenizes them."""
        pair = {side: [{"role": "assistant", "content": "Yes."}] for side in ("chosen", "rejected")}

        with pytest.raises(ValueError, match=r"with input_ids and labels, got .*: tokenize_chat\(prompt \+ answer"):
            cf.collate_pairs([pair])
