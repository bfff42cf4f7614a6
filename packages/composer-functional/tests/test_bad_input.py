"""Every public function raises an error of this library for invalid input, before it changes anything."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import kornia.augmentation as ka
import pytest
import torch
from torch import nn

from composer import functional as cf


class named(dict):
    """Keyword arguments at the end of a call."""


NAN = float("nan")
IMAGES, IDS = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
EMPTY, NO_IDS = torch.rand(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)
LOGITS = torch.randn(4, 3)
MODEL = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 3))
NO_MODEL = {"weights": torch.rand(3)}
TOKENS = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)

FLIP = ka.RandomHorizontalFlip()

WRONG_SIZES = [(0, 0), (-8, 8)]
SURGERY = [(NO_MODEL,), (None,)]

ROW = cf.pack_documents([torch.arange(3), torch.arange(2)], 8)
PACKED = cf.collate_packed([ROW])
FLAT = {"input_ids": torch.arange(5)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
PICTURED = {"input_ids": torch.tensor([[5, 5, 1], [1, 5, 5]]), "pixel_values": torch.rand(2, 3, 8, 8)}
PAIR = {"chosen": {"input_ids": IDS, "labels": IDS}, "rejected": {"input_ids": IDS, "labels": IDS}}

BAD = {
    "add_document_mask": [(TOKENS,), (IDS, "mask"), (PACKED, "masks"), (TOKENS, "cu_seqlens")],
    "alibi_slopes": [(0,), (-1,), (4, named(dtype=torch.int64))],
    "alternating_flip_batch": [
        (IMAGES, torch.arange(3), 0),
        (IMAGES, torch.arange(4).int(), 0),
        (IMAGES, torch.arange(4), -1),
        (IMAGES[0], torch.arange(4), 0),
    ],
    "apply_activation_checkpointing": [
        *SURGERY,
        (MODEL, 3),
        (MODEL, named(modules=())),
        (MODEL, named(every=0)),
        (MODEL, named(every=NAN)),
        (MODEL, named(policy="none")),
    ],
    "apply_alibi": [(NO_MODEL, 64), (MODEL, 64), (MODEL, 0)],
    "apply_blurpool": [*SURGERY, (MODEL, named(min_channels=-1)), (MODEL, named(optimizers="adam"))],
    "apply_channels_last": SURGERY,
    "apply_chunked_cross_entropy": [
        *SURGERY,
        (MODEL,),
        (MODEL, "fc"),
        (MODEL, "0"),
        (MODEL, "3", 0),
        (MODEL, "3", named(z_loss=-1.0)),
        (MODEL, "3", named(softcap=NAN)),
    ],
    "apply_depth_stacking": [
        *SURGERY,
        (MODEL, 1),
        (MODEL, 2, "random"),
        (MODEL, named(blocks="7")),
        (MODEL, named(zero_layers="fc")),
        (MODEL, named(optimizers="adam")),
    ],
    "apply_factorization": [
        *SURGERY,
        (MODEL, named(min_channels=-1)),
        (MODEL, named(latent_channels=0)),
        (MODEL, named(min_features=-1)),
        (MODEL, named(latent_features=NAN)),
    ],
    "apply_fused_layernorm": SURGERY,
    "apply_gated_attention": [*SURGERY, (MODEL,), (MODEL, named(initial_gate=1.0)), (MODEL, named(elementwise=1))],
    "apply_gated_linear_units": [*SURGERY, (MODEL,), (MODEL, named(act_fn="gelu"))],
    "apply_ghost_batchnorm": [*SURGERY, (MODEL, named(ghost_batch_size=0))],
    "apply_gradient_clipping": [(MODEL, "norms", 1.0), (MODEL, "norm", -1.0), (MODEL, "value", NAN), (3, "norm", 1.0)],
    "apply_gyro_dropout": [
        (NO_MODEL, 4, 2, 0.5, 4, 2),
        (MODEL, 0, 2, 0.5, 4, 2),
        (MODEL, 4, 0, 0.5, 4, 2),
        (MODEL, 4, 2, 1.0, 4, 2),
        (MODEL, 4, 2, NAN, 4, 2),
        (MODEL, 4, 2, 0.5, 2, 4),
        (MODEL, 4, 2, 0.5, 4, 0),
    ],
    "apply_low_precision_groupnorm": [*SURGERY, (MODEL, "amp_int3"), (MODEL, torch.int64)],
    "apply_low_precision_layernorm": [*SURGERY, (MODEL, "amp_int3"), (MODEL, torch.int64)],
    "apply_patch_dropout": [(NO_MODEL,), (MODEL, 1.0), (MODEL, -0.1)],
    "apply_neftune": [*SURGERY, (MODEL,), (MODEL, "3")],
    "apply_qk_norm": [*SURGERY, (MODEL,), (MODEL, named(eps=0)), (MODEL, named(eps="x"))],
    "apply_squeeze_excite": [*SURGERY, (MODEL, named(latent_channels=0)), (MODEL, named(min_channels=-1))],
    "apply_stochastic_depth": [
        (NO_MODEL, "ResNetBottleneck"),
        (MODEL, "ResNetNeckbottle"),
        (MODEL, "ResNetBottleneck", "sometimes"),
        (MODEL, "ResNetBottleneck", named(drop_rate=1.5)),
        (MODEL, "ResNetBottleneck", named(drop_rate=NAN)),
        (MODEL, "ResNetBottleneck", named(drop_distribution="normal")),
    ],
    "apply_value_residual": [*SURGERY, (MODEL,), (MODEL, named(initial_weight=1.5))],
    "apply_weight_standardization": [*SURGERY, (MODEL, -1)],
    "augment_batch": [
        (LOGITS, FLIP),
        (EMPTY, FLIP),
        (IDS, FLIP),
        (IMAGES, "flip"),
        (IMAGES, nn.Flatten(0, 1)),
        (IMAGES, FLIP, named(boxes=[(0, 0, 9, 9)])),
        (IMAGES, FLIP, named(boxes=torch.rand(4, 2, 4), min_visible=NAN)),
    ],
    "augmix": [(-1,), (NAN,), (3, 1, 0), (3, 1, 3, 0), (3, 1, 3, 1.0, "best")],
    "augmix_batch": [
        (LOGITS,),
        (EMPTY,),
        (IDS,),
        (IMAGES, 11),
        (IMAGES, named(augmentation_set="best")),
    ],
    "augmix_image": [
        (LOGITS,),
        ("cat.png",),
        (IMAGES[0], 11),
        (IMAGES[0], named(width=0)),
        (IMAGES[0], named(alpha=0)),
    ],
    "check_for_index_targets": [("cat",), ([0, 1],)],
    "check_packing": [(NO_MODEL, PACKED), (MODEL, TOKENS), (MODEL, IDS), (MODEL, PACKED, "masks")],
    "collate_packed": [([IDS],), ([TOKENS],)],
    "collate_pairs": [([IDS],), ([{"chosen": TOKENS}],), ([PAIR], "0")],
    "count_documents": [(IDS,), ({},), (TOKENS,), ({"input_ids": IDS[None]},)],
    "count_real_tokens": [(IDS,), ({"labels": IDS},)],
    "split_documents": [(IDS, 1), (TOKENS, 1), (FLAT, 0), (FLAT, 1.5)],
    "split_image_batch": [
        (IDS, 1, 5),
        (PICTURED, 0, 5),
        (PICTURED, 1, "<image>"),
        (PICTURED, 1, 6),
        (PICTURED | {"pixel_values_videos": IMAGES}, 1, 5),
        (PICTURED | {"mask": torch.ones(3)}, 1, 5),
    ],
    "tokenize_chat": [("hello", None), ([{"role": "user"}], None), ([], None), ([], None, "first")],
    "colout": [(-0.1,), (0.1, 1.0), (0.1, NAN), (0.1, 0.1, "sometimes")],
    "blur_2d": [(IDS,), (LOGITS,), (IMAGES, 4), (IMAGES, 3, "2"), (IMAGES, named(filter=torch.ones(2, 1, 3, 3)))],
    "colout_batch": [
        ((IMAGES, IDS), named(resize_target=True)),
        (LOGITS,),
        ("cat.png",),
        (EMPTY,),
        (IMAGES, 1.0),
        (IMAGES, 0.1, -0.1),
        (IMAGES, named(p_row=NAN)),
    ],
    "compute_ema": [(MODEL, nn.Linear(2, 2)), (MODEL, MODEL, 1.5), (MODEL, MODEL, NAN), (NO_MODEL, MODEL)],
    "compute_outer_step": [([LOGITS], [], []), ([LOGITS],) * 3 + (0.0,), ([LOGITS],) * 3 + (1.0, 1.0)],
    "compute_swa": [(MODEL, nn.Linear(2, 2), 1), (MODEL, MODEL, -1), (NO_MODEL, MODEL, 1)],
    "count_layers_to_freeze": [(-1, 0.5), (4, 1.5), (4, NAN), (4, 0.5, -0.1), (4, 0.5, 0.5, 2.0)],
    "count_module_instances": [(NO_MODEL, nn.Linear), (MODEL, "Linear")],
    "post_hoc_weights": [([], [], 0.1), ([1], [0.1, 0.1], 0.1), ([9, 9], [0.05, 0.1], 1), ([9], [0.1], 0.1, 8)],
    "power_ema_smoothing": [(0, 0.1), (1.5, 0.1), (1, 0), (1, NAN), (1, 0.3)],
    "detect_spikes": [(IDS, LOGITS), (LOGITS[:, 0], IMAGES), (LOGITS[:, 0], LOGITS, 0), (LOGITS[:, 0], LOGITS, 6.0, 1)],
    "activation_changes": [(NO_MODEL, None, abs), (MODEL, None, 3), (MODEL, None, abs, 0)],
    "width_groups": [(NO_MODEL, MODEL, 0.1), (MODEL, NO_MODEL, 0.1), (MODEL, MODEL, -1), (MODEL, MODEL, NAN)],
    "select_tokens": [(IDS, LOGITS, LOGITS > 0), (LOGITS, LOGITS, LOGITS), (LOGITS, LOGITS[:2], LOGITS > 0)],
    "draw_infobatch_weights": [(IDS,), (LOGITS,), (LOGITS[:, 0], 1.0), (LOGITS[:, 0], NAN)],
    "estimate_gradient_noise": [(2.0, LOGITS, 1, 2), (LOGITS, LOGITS, 2, 2), (LOGITS, LOGITS, 1, NAN)],
    "cutmix": [(LOGITS, IDS), (IMAGES, IDS), (EMPTY, NO_IDS, 1.0, 3), (IMAGES, IDS[:2], 1.0, 3), (IMAGES, IDS, -1, 3)],
    "cutmix_batch": [
        (LOGITS, IDS),
        (EMPTY, NO_IDS),
        (IMAGES, IDS[:2]),
        (IMAGES, IDS, -0.1),
        (IMAGES, IDS, NAN),
        (IMAGES, IDS, named(alpha=-1)),
        (IMAGES, IDS, named(bbox=(0, 0, 9, 9))),
        (IMAGES, IDS, named(indices=IDS[:2])),
    ],
    "cutout_batch": [
        (LOGITS,),
        (EMPTY,),
        (IMAGES, -1),
        (IMAGES, 1, 1.5),
        (IMAGES, 1, NAN),
        (IMAGES, named(boxes=[(0, 0, 9, 9)])),
    ],
    "draw_augmix": [(-1,), (4, -1), (4, NAN), (4, 3, 1, 0), (4, named(augmentation_set="best"))],
    "contrastive_loss": [
        ("embeddings", IDS),
        (LOGITS, [0, 1, 2]),
        (LOGITS, IDS[:2]),
        (LOGITS[0], IDS),
        (LOGITS, IDS, 0.0),
        (LOGITS, IDS, NAN),
        (LOGITS[:1], IDS[:1]),
        (LOGITS, IDS, 0.1, named(candidates=LOGITS[:, :2], candidate_labels=IDS)),
        (LOGITS, IDS, 0.1, named(first=1)),
        (LOGITS, IDS, 0.1, named(first=-1)),
    ],
    "distillation_loss": [
        (LOGITS, LOGITS[:, :2], IDS),
        (LOGITS, IDS, IDS),
        (LOGITS, LOGITS, IDS[:2]),
        (LOGITS, LOGITS, IDS, 0.0),
        (LOGITS, LOGITS, IDS, NAN),
        (LOGITS, LOGITS, IDS, 2.0, 1.5),
        (LOGITS, LOGITS, IDS, 2.0, 0.5, "ce"),
    ],
    "draw_augmentation": [("flip", IMAGES.shape), (FLIP, IMAGES.shape, named(generator=17))],
    "draw_beta": [(0,), (-1,), (NAN,)],
    "draw_box": [(WRONG_SIZES[0], (1, 1)), ((8, 8), (-1, 1))],
    "draw_corner": [((8, 8), (9, 9)), ((8, 8), (0, 0))],
    "draw_cutmix_box": [(WRONG_SIZES[0],), ((8, 8), 1.5), ((8, 8), NAN), ((8, 8), named(alpha=-1))],
    "draw_embedding_noise": [(IDS, 4), (IDS[None], 0), (IDS[None], 4, -1.0), (IDS[None], 4, 5.0, IDS)],
    "draw_holes": [(WRONG_SIZES[0],), ((8, 8), -1), ((8, 8), 1, 1.5), ((8, 8), 1, NAN)],
    "draw_kept": [(-1, 0.1), (8, 1.0), (8, -0.1), (8, NAN)],
    "draw_mixing": [(-1,), (NAN,), (float("inf"),)],
    "draw_permutation": [(-1,), (torch.tensor(3),)],
    "draw_randaugment": [(-1,), (3.5,), (4, 11), (4, NAN), (4, 9, -1), (4, 9, 2, "best")],
    "ensure_targets_one_hot": [(LOGITS, IDS[:2]), (LOGITS, LOGITS[:, :2]), (LOGITS, "cat")],
    "factorize_conv2d": [(LOGITS, 1), (torch.rand(4, 3, 3, 3), 0), (torch.rand(4, 3, 3, 3), 99)],
    "factorize_matrix": [(IMAGES, 1), (LOGITS, 0), (LOGITS, 99), (LOGITS, 1, named(inputs=torch.rand(5, 7)))],
    "freeze_layers": [(NO_MODEL, None, 0.5), (MODEL, None, 1.5), (MODEL, None, NAN), (MODEL, "adam", 0.5)],
    "infer_target_type": [(LOGITS, IDS[:2]), (LOGITS, LOGITS[:, :2])],
    "linear_cross_entropy": [
        (LOGITS, LOGITS, IDS[:2]),
        (LOGITS, LOGITS[:, :2], IDS),
        (LOGITS, LOGITS, IDS.float()),
        (LOGITS, LOGITS, IDS, named(bias=torch.rand(3))),
        (LOGITS, LOGITS, IDS, named(chunk_size=0)),
        (LOGITS, LOGITS, IDS, named(label_smoothing=2.0)),
        (LOGITS, LOGITS, IDS, named(z_loss=-1.0)),
        (LOGITS, LOGITS, IDS, named(softcap=0.0)),
        (LOGITS, LOGITS, IDS, named(reduction="median")),
    ],
    "mixup": [
        (IMAGES, IDS),
        (IMAGES, [0, 1, 2, 0], 0.2, 3),
        (EMPTY, NO_IDS, 0.2, 3),
        (IMAGES, IDS, -1, 3),
        (IMAGES.byte(), IDS, 0.2, 3),
    ],
    "mixup_batch": [
        (EMPTY, NO_IDS),
        (IMAGES.byte(), IDS),
        (IMAGES, IDS[:2]),
        (IMAGES, IDS, 1.5),
        (IMAGES, IDS, NAN),
        (IMAGES, IDS, named(alpha=-1)),
        (IMAGES, IDS, named(indices=IDS[:2])),
    ],
    "orthogonalize": [
        (IDS,),
        (torch.rand(3),),
        (LOGITS, "cubic"),
        (LOGITS, (1.0, 2.0)),
        (LOGITS, [(1.0, NAN, 2.0)]),
        (LOGITS, 3),
        (LOGITS, named(steps=0)),
        (LOGITS, named(eps=0)),
        (LOGITS, named(dtype=torch.int64)),
    ],
    "pack_documents": [
        ([], 8),
        ([IDS], 3),
        ([IDS], 0),
        ([NO_IDS], 8),
        ([[1, 2]], 8),
        ([TOKENS["input_ids"]], 8),
        ([IDS], 8, named(labels=[IDS[:2]])),
        ([IDS], 8, named(pad_id=0.5)),
    ],
    "pack_lengths": [([1, 0], 4), ([5], 4), ([1.5], 4), ([1], 0), ([1], 4, "worst_fit")],
    "parameter_groups": [
        (NO_MODEL, named(weight_decay=0.1)),
        (MODEL, named(weight_decay=-0.1)),
        (MODEL, NAN, named(weight_decay=0.1)),
        (MODEL, named(weight_decay=0.1, layer_decay=0.5)),
        (MODEL, 0.1, named(weight_decay=0.1, layer_decay=1.5)),
        (MODEL, 0.1, named(weight_decay=0.1, layer_decay=0.5)),
        (MODEL, named(weight_decay=0.1, no_decay=["bias"])),
        (MODEL, named(weight_decay=0.1, no_decay=3)),
    ],
    "randaugment": [(-1,), (11,), (NAN,), (9, -1), (9, 2, "best")],
    "randaugment_batch": [(LOGITS,), (EMPTY,), (IDS,), (IMAGES, 11), (IMAGES, 9, -1), (IMAGES, 9, 2, "best")],
    "randaugment_image": [(LOGITS,), ("cat.png",), (IMAGES[0], 11), (IMAGES[0], NAN), (IMAGES[0], 9, -1)],
    "replace_module_classes": [(NO_MODEL, {}), (MODEL, {nn.ReLU: lambda module, index: "GELU"})],
    "resize_batch": [
        (LOGITS, IDS, 0.5),
        (EMPTY, NO_IDS, 0.5),
        (IMAGES, IDS, 0),
        (IMAGES, IDS, 1.5),
        (IMAGES, IDS, NAN),
        (IMAGES, IDS, 0.5, "stretch"),
        (IMAGES, IDS, 0.5, "resize", True),
    ],
    "select_using_loss": [
        (EMPTY, NO_IDS, MODEL, nn.functional.cross_entropy),
        (IMAGES, IDS[:2], MODEL, nn.functional.cross_entropy),
        (IMAGES, IDS, MODEL, nn.functional.cross_entropy, 0),
        (IMAGES, IDS, MODEL, nn.functional.cross_entropy, NAN),
        (IMAGES, IDS, MODEL, nn.functional.cross_entropy, 0.5, 2.0),
    ],
    "set_batch_sequence_length": [(IMAGES, 4), (TOKENS, 0), ({}, 4), (TOKENS, 2.5)],
    "set_drop_rates": [(NO_MODEL, 0.1), (MODEL, 1.5), (MODEL, NAN), (MODEL, 0.1, "normal")],
    "should_selective_backprop": [(1.5, 0), (NAN, 0), (0.5, -1), (0.5, 0, 0.9, 0.5), (0.5, 0, named(interrupt=-1))],
    "smooth_labels": [(3, IDS), (LOGITS, IDS[:2]), (LOGITS, IDS, 1.5), (LOGITS, IDS, NAN), (LOGITS, LOGITS[:, :2])],
    "soft_cross_entropy": [(LOGITS, IDS[:2]), (LOGITS, LOGITS[:, :2]), (LOGITS, IDS, named(reduction="median"))],
    "softcap": [(IDS, 30.0), (LOGITS, 0.0), (LOGITS, NAN)],
    "standardize_weight": [(IDS,), (torch.rand(3), -1.0), ("weight",)],
    "take_samples": [(IMAGES, "first", 4), (IMAGES, IDS.float(), 4), (IMAGES, IDS, 4.0), (IMAGES, IDS[None], 4)],
    "unfreeze_layers": [(NO_MODEL,)],
    "update_averages": [([LOGITS], [], 0.5), ([LOGITS], [LOGITS], 1.5), ([LOGITS], [LOGITS], NAN)],
    "update_params_in_optimizer": [(MODEL.parameters(), MODEL.parameters(), "adam")],
}
CLASSES = {
    "AlibiBias": [(0,)],
    "AlternatingFlip": [(iter([]),)],
    "AugmentAndMixTransform": [(11,), (3, 1, 0)],
    "BlurConv2d": [(named(conv=nn.Linear(2, 2)),), (3, 4, 3), (3, named(conv=nn.Conv2d(3, 4, 3, stride=2)))],
    "BlurPool2d": [(-1,), (16, 0)],
    "ChunkedHead": [(4, 3, named(chunk_size=0)), (4, 3, named(z_loss=NAN)), (4, 3, named(softcap=0))],
    "ColOutTransform": [(1.0,), (0.1, NAN)],
    "FactorizedConv2d": [(16, 16, 3, named(latent_channels=0))],
    "FactorizedLinear": [(16, 16, named(latent_features=0))],
    "GatedLinearUnit": [(nn.Linear(2, 2), nn.Linear(2, 2), "gelu")],
    "GhostBatchNorm2d": [(4, 0)],
    "GyroDropout": [(0, 1), (4, 2, 1.0), (4, 2, 0.5, 2, 4)],
    "LowPrecisionLayerNorm": [(4, named(precision=torch.int64))],
    "PatchDropout": [(1.0,), (NAN,), (0.5, -1)],
    "RandAugmentTransform": [(11,), (9, -1), (9, 2, "best")],
    "SAMOptimizer": [("sgd",), (SGD, -0.1), (SGD, NAN), (SGD, 0.05, 0), (SGD, 0.05, 1e-12, 0)],
    "SqueezeExcite2d": [(0,), (16, 0), (16, NAN)],
}
CASES = [(name, number) for name, calls in (BAD | CLASSES).items() for number in range(len(calls))]


def call(name, number):
    """Call a public function of a case."""
    *arguments, last = (BAD | CLASSES)[name][number]
    if isinstance(last, named):
        return getattr(cf, name)(*arguments, **last)
    return getattr(cf, name)(*arguments, last)


def test_every_function_is_tested():
    """Each public function has cases."""
    functions = {name for name in cf.__all__ if name[0].islower()}

    assert functions == set(BAD)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_errors_are_sentences(name, number):
    """The library itself raises the error, which has the value and one or two sentences."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(name, number)

    place = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    text = str(caught.value)
    assert Path(place).is_relative_to(Path(cf.__file__).parent), place
    assert 30 < len(text) < 600
    assert text.endswith((".", ")"))


def test_models_do_not_change():
    """After all invalid calls the models are unchanged."""
    weights = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}

    for name, number in CASES:
        with pytest.raises((TypeError, ValueError)):
            call(name, number)

    assert [type(layer) for layer in MODEL] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in MODEL.state_dict().items())


def network():
    """Return a model with a layer for every surgery without extras."""
    convolutions = nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.GroupNorm(2, 16), nn.Dropout(), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3))


def with_gradients(model):
    """Return a model whose parameters have gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def gpt2():
    """Return a minimal GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2, n_positions=8))


def bert():
    """Return a minimal BERT."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertModel(BertConfig(**sizes, vocab_size=8))


def packable():
    """Return a minimal language model that takes packed sequences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8, use_cache=False))


def words():
    """Return a minimal tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, "hello": 2}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for one in messages %}{{ one.role + ' ' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def stochastic():
    """Return a model with stochastic blocks."""
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    cf.apply_stochastic_depth(model, nn.Identity)
    return model


CONV, SIZE = torch.rand(4, 3, 3, 3), (8, 8)
GYRO = {"iters_per_epoch": 4, "max_epoch": 2, "p": 0.5, "sigma": 4, "tau": 2}
VALID = {
    "add_document_mask": lambda: {"batch": PACKED},
    "check_packing": lambda: {"model": packable(), "batch": PACKED},
    "collate_packed": lambda: {"rows": [ROW]},
    "collate_pairs": lambda: {"pairs": [PAIR]},
    "count_documents": lambda: {"batch": FLAT},
    "count_real_tokens": lambda: {"batch": TOKENS},
    "split_documents": lambda: {"batch": FLAT, "microbatch_size": 1},
    "split_image_batch": lambda: {"batch": PICTURED, "microbatch_size": 1, "image_token_id": 5},
    "tokenize_chat": lambda: {"chat": [{"role": "user"}, {"role": "assistant"}], "tokenizer": words()},
    "pack_documents": lambda: {"documents": [IDS], "length": 8},
    "pack_lengths": lambda: {"lengths": [3, 2], "length": 8},
    "AlibiBias": lambda: {"num_heads": 4},
    "AlternatingFlip": lambda: {"dataset": [0, 1]},
    "AugmentAndMixTransform": dict,
    "BlurConv2d": lambda: {"conv": nn.Conv2d(3, 4, 3, stride=2)},
    "BlurMaxPool2d": lambda: {"kernel_size": 2},
    "AttentionLayout": lambda: {"module": nn.Linear, "head_dim": 4},
    "BlurPool2d": dict,
    "ChunkedHead": lambda: {"in_features": 4, "out_features": 3},
    "ColOutTransform": dict,
    "FactorizedConv2d": lambda: {"in_channels": 8, "out_channels": 8, "kernel_size": 3},
    "FactorizedLinear": lambda: {"in_features": 8, "out_features": 8},
    "GhostBatchNorm2d": lambda: {"num_features": 4},
    "GyroDropout": lambda: GYRO,
    "PatchDropout": dict,
    "RandAugmentTransform": dict,
    "SAMOptimizer": lambda: {"base_optimizer": SGD},
    "SqueezeExcite2d": lambda: {"num_features": 16},
    "WeightStandardizer": dict,
    "alibi_slopes": lambda: {"num_heads": 4},
    "alternating_flip_batch": lambda: {"images": torch.rand(4, 3, 8, 8), "indices": torch.arange(4), "epoch": 1},
    "apply_activation_checkpointing": lambda: {"model": network()},
    "apply_alibi": lambda: {"model": bert(), "max_sequence_length": 16},
    "apply_blurpool": lambda: {"model": network()},
    "apply_channels_last": lambda: {"model": network()},
    "apply_chunked_cross_entropy": lambda: {"model": network(), "head": "7"},
    "apply_depth_stacking": lambda: {"model": gpt2()},
    "apply_factorization": lambda: {"model": network()},
    "apply_fused_layernorm": lambda: {"model": network()},
    "apply_gated_attention": lambda: {"model": gpt2()},
    "apply_gated_linear_units": lambda: {"model": bert()},
    "apply_ghost_batchnorm": lambda: {"model": network()},
    "apply_gradient_clipping": lambda: {
        "model": with_gradients(network()),
        "clipping_type": "norm",
        "clipping_threshold": 1.0,
    },
    "apply_gyro_dropout": lambda: {"model": network(), **GYRO},
    "apply_low_precision_groupnorm": lambda: {"model": network(), "precision": "amp_bf16"},
    "apply_low_precision_layernorm": lambda: {"model": network(), "precision": "amp_bf16"},
    "apply_patch_dropout": lambda: {"model": network()},
    "apply_neftune": lambda: {"model": nn.Sequential(nn.Embedding(3, 2))},
    "apply_qk_norm": lambda: {"model": gpt2()},
    "apply_squeeze_excite": lambda: {"model": network()},
    "apply_stochastic_depth": lambda: {"model": nn.Sequential(nn.Identity()), "target_layer_name": nn.Identity},
    "apply_value_residual": lambda: {"model": gpt2()},
    "apply_weight_standardization": lambda: {"module": network()},
    "augmix": dict,
    "blur_2d": lambda: {"input": IMAGES},
    "augmix_batch": lambda: {"input": IMAGES},
    "augmix_image": lambda: {"img": IMAGES[0]},
    "check_for_index_targets": lambda: {"targets": IDS},
    "colout": dict,
    "colout_batch": lambda: {"sample": (IMAGES, IDS)},
    "compute_ema": lambda: {"model": nn.Linear(2, 2), "ema_model": nn.Linear(2, 2)},
    "compute_outer_step": lambda: {"weights": [LOGITS], "differences": [LOGITS], "momenta": [LOGITS]},
    "compute_swa": lambda: {"model": nn.Linear(2, 2), "swa_model": nn.Linear(2, 2), "num_averaged": 1},
    "count_layers_to_freeze": lambda: {"num_layers": 4, "current_duration": 0.5},
    "count_module_instances": lambda: {"module": MODEL, "module_class": nn.Linear},
    "cutmix": lambda: {"data": IMAGES, "target": IDS, "num_classes": 3},
    "augment_batch": lambda: {"input": IMAGES, "augmentation": FLIP},
    "contrastive_loss": lambda: {"embeddings": LOGITS, "labels": IDS},
    "distillation_loss": lambda: {"student_logits": LOGITS, "teacher_logits": LOGITS, "targets": IDS},
    "draw_augmentation": lambda: {"augmentation": FLIP, "shape": IMAGES.shape},
    "cutmix_batch": lambda: {"input": IMAGES, "target": IDS},
    "cutout_batch": lambda: {"input": IMAGES},
    "post_hoc_weights": lambda: {"num_updates": [9, 9], "sigma_rels": [0.05, 0.1], "sigma_rel": 0.1},
    "power_ema_smoothing": lambda: {"num_updates": 9},
    "activation_changes": lambda: {
        "model": (model := nn.Linear(2, 1)),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "compute_loss": lambda one: one(torch.ones(1, 2)).sum(),
    },
    "width_groups": lambda: {"model": MODEL, "base_model": MODEL, "lr": 0.1},
    "select_tokens": lambda: {"losses": LOGITS, "reference_losses": LOGITS, "mask": LOGITS > 0},
    "draw_infobatch_weights": lambda: {"scores": LOGITS[:, 0]},
    "estimate_gradient_noise": lambda: {"small_square": LOGITS, "big_square": LOGITS, "small_size": 1, "big_size": 2},
    "detect_spikes": lambda: {"values": LOGITS[:, 0], "history": LOGITS},
    "draw_augmix": lambda: {"count": 4},
    "draw_beta": lambda: {"alpha": 0.2},
    "draw_box": lambda: {"size": SIZE, "sides": (2, 2)},
    "draw_corner": lambda: {"size": SIZE, "crop_size": (4, 4)},
    "draw_cutmix_box": lambda: {"size": SIZE},
    "draw_embedding_noise": lambda: {"ids": IDS[None], "embedding_dim": 4},
    "draw_holes": lambda: {"size": SIZE},
    "draw_kept": lambda: {"count": 8, "p": 0.2},
    "draw_mixing": dict,
    "draw_permutation": lambda: {"count": 4},
    "draw_randaugment": lambda: {"count": 4},
    "ensure_targets_one_hot": lambda: {"input": LOGITS, "targets": IDS},
    "factorize_conv2d": lambda: {"weight": CONV, "rank": 2},
    "factorize_matrix": lambda: {"weight": LOGITS, "rank": 2},
    "freeze_layers": lambda: {"model": network(), "optimizers": None, "current_duration": 0.7},
    "infer_target_type": lambda: {"input": LOGITS, "targets": IDS},
    "linear_cross_entropy": lambda: {"hidden": LOGITS, "weight": LOGITS, "targets": IDS},
    "mixup": lambda: {"data": IMAGES, "target": IDS, "num_classes": 3},
    "mixup_batch": lambda: {"input": IMAGES, "target": IDS},
    "orthogonalize": lambda: {"matrices": LOGITS},
    "parameter_groups": lambda: {"model": network(), "weight_decay": 0.1},
    "randaugment": dict,
    "randaugment_batch": lambda: {"input": IMAGES},
    "randaugment_image": lambda: {"img": IMAGES[0]},
    "replace_module_classes": lambda: {"module": network(), "policies": {}},
    "resize_batch": lambda: {"input": IMAGES, "target": IDS, "scale_factor": 0.5},
    "select_using_loss": lambda: {
        "input": IMAGES,
        "target": IDS,
        "model": nn.Sequential(nn.Flatten(), nn.Linear(192, 3)),
        "loss_fun": nn.functional.cross_entropy,
    },
    "set_batch_sequence_length": lambda: {"batch": TOKENS, "curr_seq_len": 4},
    "set_drop_rates": lambda: {"model": stochastic(), "drop_rate": 0.5},
    "should_selective_backprop": lambda: {"current_duration": 0.6, "batch_idx": 0},
    "smooth_labels": lambda: {"logits": LOGITS, "target": IDS},
    "soft_cross_entropy": lambda: {"input": LOGITS, "target": IDS},
    "softcap": lambda: {"logits": LOGITS, "cap": 30.0},
    "standardize_weight": lambda: {"weight": CONV},
    "take_samples": lambda: {"batch": (IMAGES, IDS), "chosen": IDS, "num_samples": 4},
    "unfreeze_layers": lambda: {"model": network()},
    "update_averages": lambda: {"averaged": [torch.rand(2)], "current": [torch.rand(2)]},
    "update_params_in_optimizer": lambda: {
        "old_params": MODEL.parameters(),
        "new_params": MODEL.parameters(),
        "optimizers": SGD,
    },
}
OF_NO_KIND = {
    "float": ["0.2", True, NAN, torch.tensor([0.5, 0.5])],
    "int": ["3", True, 2.5, NAN],
    "bool": ["yes", 1, NAN],
    "tuple[int, int]": ["88", 8, (8, 2.5)],
    "torch.Generator": [3, "seed"],
    "Tensor": ["cat", 3, NAN],
    "nn.Module": ["model", 3, nn.Linear],
}
IGNORED = {("apply_gradient_clipping", "fsdp_enabled")}
"""Parameters that are accepted for old code and never read."""


def wrong_kinds(name):
    """Return for each parameter that is of one kind, or may be missing, what is none of that kind."""
    for parameter in inspect.signature(getattr(cf, name)).parameters.values():
        kind = str(parameter.annotation).removesuffix(" | None")
        if (name, parameter.name) not in IGNORED:
            yield from ((parameter.name, value) for value in OF_NO_KIND.get(kind, ()))


def test_every_function_has_a_valid_call():
    """Each public function has a valid call, which is then made invalid."""
    assert {name for name in cf.__all__ if name[0].islower()} <= set(VALID)

    for name, make in VALID.items():
        getattr(cf, name)(**make())


@pytest.mark.parametrize("name", VALID)
def test_wrong_types_raise(name):
    """A string, a bool, NaN or another wrong type raises an error of the library with the parameter's name."""
    for parameter, value in wrong_kinds(name):
        arguments = VALID[name]() | {parameter: value}

        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(cf, name)(**arguments)

        place = traceback.extract_tb(caught.value.__traceback__)[-1].filename
        assert Path(place).is_relative_to(Path(cf.__file__).parent), (parameter, value)
        assert parameter in str(caught.value), (parameter, value)


@pytest.mark.parametrize("name", ["smooth_labels", "soft_cross_entropy", "ensure_targets_one_hot", "mixup", "cutmix"])
def test_label_out_of_range_raises(name):
    """A class id out of range raises an error with the range and the ids."""
    arguments = VALID[name]()
    target = "targets" if name == "ensure_targets_one_hot" else "target"

    with pytest.raises(ValueError, match=rf"^{target} must hold class ids from 0 to 2, or .*, got ids from 0 to 3\."):
        getattr(cf, name)(**arguments | {target: torch.tensor([0, 3, 1, 2])})


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "actual"),
        [
            ("apply_ema", "compute_ema"),
            ("label_smoothing", "smooth_labels"),
            ("apply_blurpol", "apply_blurpool"),
            ("mixupbatch", "mixup_batch"),
        ],
    )
    def test_own_name_is_suggested(self, name, actual):
        """The name in another library, and a misspelling, suggest the public name."""
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Did you mean '{actual}'\?"):
            getattr(cf, name)

    def test_unknown_name_without_suggestion(self):
        """Without a similar name, the error states where the names are listed."""
        with pytest.raises(AttributeError, match=r"no attribute 'quantize_kernel'\. See composer\.functional\.__all__"):
            cf.quantize_kernel  # noqa: B018

    def test_hasattr_and_import_work(self):
        """``hasattr`` and ``from … import`` behave as with any module."""
        assert not hasattr(cf, "apply_ema")
        with pytest.raises(ImportError, match="apply_ema"):
            exec("from composer.functional import apply_ema")
