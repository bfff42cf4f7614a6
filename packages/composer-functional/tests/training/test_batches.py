"""Batches of flattened documents and of images as patches are split with what belongs to each sample."""

import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from composer import functional as cf
from composer.functional.training.batches import count_flattened, warn_of_padding

IMAGE, VIDEO, PAD = 5, 6, 2
GRIDS = [(1, 4, 4), (1, 2, 4), (1, 4, 6), (2, 2, 2)]
"""Three images and a video, of 4, 2, 6 and 2 tokens, each for 4 patches."""


def make_qwen():
    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": 64, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": PAD}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text |= {"rope_parameters": rope, "rope_scaling": rope}  # of Transformers 5 and 4
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    return Qwen2VLForConditionalGeneration(config).double()


def make_pictured():
    """Return a batch of five rows: one image, two, no image, a video, and text."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        [7, *[IMAGE] * 4, 8, 10, 11],
        [7, *[IMAGE] * 2, 8, 13, 7, *[IMAGE] * 6, 8, 12],
        [13, 14, 15],
        [7, *[VIDEO] * 2, 8, 20],
        [16, 17],
    ]
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO),
        "labels": ids.where((ids >= 10), -100),
        "pixel_values": torch.randn(48, 24, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor(GRIDS[:3]),
        "pixel_values_videos": torch.randn(8, 24, generator=generator, dtype=torch.float64),
        "video_grid_thw": torch.tensor(GRIDS[3:]),
        "second_per_grid_ts": [0.5],
        "names": ["a", "b", "c", "d", "e"],
        "scale": 3,
    }


class TestSplitImageBatch:
    def split(self, batch, size):
        return cf.split_image_batch(batch, size, image_token_id=IMAGE, video_token_id=VIDEO)

    def test_parts_have_their_images(self):
        """Each part has the patches and grids of its rows; one without images has no such entries."""
        batch = make_pictured()

        parts = self.split(batch, 1)

        pixels = batch["pixel_values"]
        assert [len(part["input_ids"]) for part in parts] == [1] * 5
        assert torch.equal(parts[0]["pixel_values"], pixels[:16])
        assert torch.equal(parts[1]["pixel_values"], pixels[16:])
        assert [part["image_grid_thw"].tolist() for part in parts[:2]] == [[[1, 4, 4]], [[1, 2, 4], [1, 4, 6]]]
        assert parts[3]["pixel_values_videos"] is not batch["pixel_values_videos"]
        assert torch.equal(parts[3]["pixel_values_videos"], batch["pixel_values_videos"])
        assert parts[3]["second_per_grid_ts"] == [0.5]
        visual = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
        assert [len(visual & part.keys()) for part in parts] == [2, 2, 0, 3, 0]
        assert [part["names"] for part in parts] == [["a"], ["b"], ["c"], ["d"], ["e"]]
        assert all(part["scale"] == 3 for part in parts)

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
    def test_gradients_are_those_of_the_batch(self, size):
        """The losses of the parts, weighted by their labels, have the gradients of the loss of the batch."""
        model, batch = make_qwen(), make_pictured()

        def step(part):
            inputs = {name: value for name, value in part.items() if name not in {"names", "scale"}}
            count = int((part["labels"][:, 1:] != -100).sum())
            return model(**inputs).loss * count

        step(batch).backward()
        expected = [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        for part in self.split(batch, size):
            step(part).backward()

        pairs = zip(model.parameters(), expected, strict=True)
        assert all(torch.allclose(each.grad, other, atol=1e-10) for each, other in pairs)

    def test_images_without_a_grid(self):
        """Images of a row each have equally many tokens; positions of three axes are split along the rows."""
        ids = torch.ones(3, 99, dtype=torch.long)
        ids[0, :49], ids[2, 1:] = IMAGE, IMAGE  # whose 49th part of 1 is no sum of powers of 2
        positions = torch.arange(3 * 3 * 99).view(3, 3, 99)
        batch = {"input_ids": ids, "pixel_values": torch.rand(3, 3, 8, 8), "position_ids": positions}

        parts = cf.split_image_batch(batch, 2, IMAGE)

        assert torch.equal(parts[0]["pixel_values"], batch["pixel_values"][:1])
        assert torch.equal(parts[1]["pixel_values"], batch["pixel_values"][1:])
        assert torch.equal(parts[0]["position_ids"], positions[:, :2])

    def test_truncated_text_raises(self):
        """A row that lacks tokens of one of the images raises an error, and so does the id of another model."""
        batch = make_pictured()
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][0, 1] = 10

        with pytest.raises(ValueError, match="tokens of complete images, with image_token_id=5"):
            self.split(batch, 1)
        with pytest.raises(ValueError, match="tokens of complete images, with video_token_id=60"):
            cf.split_image_batch(make_pictured(), 1, IMAGE, 60)

    def test_unknown_entries_raise(self):
        """A tensor of another size than the rows raises an error with its name."""
        with pytest.raises(ValueError, match="'deltas' of shape"):
            self.split({**make_pictured(), "deltas": torch.zeros(3)}, 1)
        with pytest.raises(ValueError, match="'pixel_values_videos' of shape"):
            cf.split_image_batch(make_pictured(), 1, IMAGE)


def make_flat(*, with_ends):
    """Return a row of four documents, as Transformers' collator makes it, and the documents."""
    documents = [torch.arange(3, 3 + size).tolist() for size in (5, 1, 7, 3)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=with_ends, return_seq_idx=with_ends)
    return dict(collate([{"input_ids": one, "labels": one} for one in documents])), documents


class TestSplitDocuments:
    @pytest.mark.parametrize("with_ends", [False, True])
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
    def test_parts_are_batches_of_their_documents(self, with_ends, size):
        """A part is what the collator makes of its documents."""
        batch, documents = make_flat(with_ends=with_ends)
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=with_ends, return_seq_idx=with_ends)

        parts = cf.split_documents(batch, size)

        assert cf.count_documents(batch) == 4
        assert len(parts) == -(-4 // size)
        for place, part in enumerate(parts):
            of_part = documents[place * size : (place + 1) * size]
            expected = collate([{"input_ids": one, "labels": one} for one in of_part])
            assert cf.count_documents(part) == len(of_part)
            assert part.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(torch.as_tensor(part[name]), torch.as_tensor(value)), name
                assert type(part[name]) is type(value)

    def test_gradients_are_those_of_the_batch(self):
        """The losses of the parts, weighted by their labels, have the gradients of the loss of the row."""
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, use_cache=False, **sizes)).double()
        batch, _ = make_flat(with_ends=False)

        def step(part):
            count = int((part["labels"][:, 1:] != -100).sum())
            (model(**part).loss * count if count else model(**part).logits.sum() * 0).backward()

        step(batch)
        expected = [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        for part in cf.split_documents(batch, 1):
            step(part)

        pairs = zip(model.parameters(), expected, strict=True)
        assert all(torch.allclose(each.grad, other, atol=1e-12) for each, other in pairs)

    def test_other_entries(self):
        """Embeddings, masks and positions of three axes are split along the tokens; values are in each part."""
        batch, _ = make_flat(with_ends=True)
        mask = torch.arange(256).view(1, 1, 16, 16)
        batch |= {"inputs_embeds": torch.rand(1, 16, 16), "attention_mask": mask, "weights": torch.arange(16), "k": 2}
        del batch["position_ids"]
        batch["position_ids"] = torch.arange(48).view(3, 1, 16)

        part = cf.split_documents(batch, 2)[1]

        assert torch.equal(part["inputs_embeds"], batch["inputs_embeds"][:, 6:])
        assert torch.equal(part["attention_mask"], mask[:, :, 6:, 6:])
        assert torch.equal(part["position_ids"], batch["position_ids"][:, :, 6:])
        assert part["weights"].tolist() == [*range(6, 16)]
        assert part["k"] == 2


class TestCountRealTokens:
    def test_padding_is_not_counted(self):
        """Tokens are those of the mask of the same shape, of packed rows those of documents, otherwise all."""
        ids = torch.ones(3, 2, 8, dtype=torch.long)
        mask = torch.zeros_like(ids)
        mask[:, :, 3:] = 1
        packed = cf.collate_packed([cf.pack_documents([torch.arange(3), torch.arange(2)], 8)])

        assert cf.count_real_tokens({"input_ids": ids, "attention_mask": mask}) == 30
        assert cf.count_real_tokens({"input_ids": ids, "attention_mask": mask.bool()}) == 30
        assert cf.count_real_tokens({"input_ids": ids}) == 48
        assert cf.count_real_tokens(packed) == 5
        assert cf.count_real_tokens(cf.add_document_mask(packed)) == 5

    def test_a_clock_of_padding_is_reported(self):
        """A number of tokens that includes padding gives a warning with the remedy."""
        batch = {"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}

        with pytest.warns(UserWarning, match=r"of 8 tokens in the first batch 5 are real.*count_real_tokens"):
            warn_of_padding(batch, 8)
        warn_of_padding(batch, 5)
        warn_of_padding(torch.ones(2), 0)

    def test_other_counts_are_those_of_the_user(self):
        """A number with tokens beside the ids, and ids that are no tensor, give neither a warning nor an error."""
        batch = {"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}

        warn_of_padding(batch, 11)
        warn_of_padding({"input_ids": [[1, 2], [3]]}, 3)


class TestCountFlattened:
    def test_rows(self):
        """Documents are counted in one flattened row; other rows, packed rows and positions of images have none."""
        ids, positions = torch.ones(1, 5), torch.tensor([[0, 1, 2, 0, 1]])

        assert count_flattened({"input_ids": ids, "position_ids": positions}) == 2
        assert count_flattened({"input_ids": ids, "position_ids": torch.arange(5)[None]}) == 1
        assert not count_flattened({"input_ids": ids, "position_ids": positions.expand(3, 1, 5)})
        assert not count_flattened({"input_ids": ids.expand(2, 5), "position_ids": positions.expand(2, 5)})
        assert not count_flattened({"input_ids": ids[None], "position_ids": positions[None]})
        assert not count_flattened({"input_ids": ids[:, :1], "position_ids": positions[:, :1]})
        assert not count_flattened(cf.collate_packed([cf.pack_documents([torch.arange(3), torch.arange(2)], 5)]))
        assert not count_flattened({"input_ids": ids})
        assert not count_flattened(ids)

    def test_positions_of_padding(self):
        """In a row with a mask, positions that are 0 at padding start no documents."""
        mask = torch.tensor([[0, 0, 1, 1, 1]])
        positions = (mask.cumsum(1) - 1).clamp(min=0)

        assert not count_flattened({"input_ids": mask, "position_ids": positions, "attention_mask": mask})
