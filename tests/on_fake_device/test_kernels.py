"""Every public kernel and layer on the device, forward and backward, in the dtypes that it takes."""

import copy

import kornia.augmentation as ka
import pytest
import torch
from torch import nn

from composer import functional as cf
from fixtures.kernels import DTYPES, LAYERS, ON_FLOATS, ON_PIXELS, ON_TEXT, backward, kernel_inputs
from on_fake_device.guards import devices

PIPELINE = ka.AugmentationSequential(ka.RandomAffine(15.0, p=1.0), ka.ColorJitter(0.2, 0.2, 0.2, p=1.0))


WITH_DRAWS = {
    "cutout_batch of annotated images": lambda x: cf.cutout_batch(x.annotated, 2, generator=x.generator),
    "augment_batch, boxes in a tensor": lambda x: cf.augment_batch(
        x.images, PIPELINE, masks=x.masks, boxes=x.tokens.detach()[..., :4], generator=x.generator
    ),
    "augment_batch": lambda x: cf.augment_batch(x.images, PIPELINE, generator=x.generator),
    "augmix_batch": lambda x: cf.augmix_batch(x.images.detach(), generator=x.generator),
    "colout_batch": lambda x: cf.colout_batch(x.images, generator=x.generator),
    "cutmix_batch": lambda x: cf.cutmix_batch(x.images, x.labels, generator=x.generator)[0],
    "cutout_batch": lambda x: cf.cutout_batch(x.images, 2, generator=x.generator),
    "randaugment_batch": lambda x: cf.randaugment_batch(x.images.detach(), generator=x.generator),
    "resize_batch": lambda x: cf.resize_batch(x.images, x.labels, 0.5, "crop", generator=x.generator)[0],
    "draw_permutation": lambda x: cf.draw_permutation(x.images, generator=x.generator),
}
ANNOTATED = {
    "augment_batch": lambda x: cf.augment_batch(
        x.images,
        PIPELINE,
        masks=x.masks,
        boxes=x.boxes,
        keypoints=x.keypoints,
        labels=x.classes,
        generator=x.generator,
    ),
    "colout_batch": lambda x: cf.colout_batch(x.annotated._replace(keypoints=x.keypoints), generator=x.generator),
    "cutmix_batch": lambda x: cf.cutmix_batch(x.annotated, None, length=0.5, generator=x.generator),
}
FLOATS_WITH_DRAWS = {
    "mixup_batch, annotated": lambda x: cf.mixup_batch(x.annotated._replace(masks=None), None, generator=x.generator),
    "augment_batch, boxes in a tensor": lambda x: cf.augment_batch(
        x.images, PIPELINE, masks=x.masks, boxes=x.tokens.detach()[..., :4], generator=x.generator
    ),
    "draw_embedding_noise": lambda x: cf.draw_embedding_noise(x.text["input_ids"], 6, generator=x.generator),
    "mixup_batch": lambda x: cf.mixup_batch(x.images, x.labels, generator=x.generator)[0],
    "check_for_index_targets": lambda x: cf.check_for_index_targets(x.labels),
    "infer_target_type": lambda x: cf.infer_target_type(x.logits, x.labels),
}
ON_MODELS = {
    "apply_gradient_clipping": lambda model, _: cf.apply_gradient_clipping(model, "norm", 1.0),
    "apply_gradient_clipping by value": lambda model, _: cf.apply_gradient_clipping(model, "value", 1.0),
    "apply_gradient_clipping adaptively": lambda model, _: cf.apply_gradient_clipping(model, "adaptive", 1.0),
    "compute_ema": cf.compute_ema,
    "compute_outer_step": lambda model, average: cf.compute_outer_step(
        *([one.detach() for one in each.parameters()] for each in (model, average, average)), 0.7, 0.9
    ),
    "compute_swa": lambda model, average: cf.compute_swa(model, average, 1),
    "freeze_layers": lambda model, _: cf.freeze_layers(model, None, 1.0),
    "unfreeze_layers": lambda model, _: cf.unfreeze_layers(model),
}
NOT_HERE = {
    "of samples, on the CPU": """AlternatingFlip AugmentAndMixTransform ColOutTransform RandAugmentTransform augmix
        augmix_image check_packing collate_packed collate_pairs colout pack_documents pack_lengths randaugment
        randaugment_image tokenize_chat""",
    "draws on the CPU": """draw_augmentation draw_augmix draw_beta draw_box draw_corner draw_cutmix_box draw_holes
        draw_infobatch_weights draw_kept draw_mixing draw_randaugment""",
    "types of values": """AttentionLayout AugMixDraws AugmentationDraws AugmentedBatch CutMixBatch MixUpBatch
        RandAugmentDraws Replacement ReplacementFunction ResidualRule SurgeryReport""",
    "without tensors": """count_layers_to_freeze count_module_instances parameter_groups post_hoc_weights
        power_ema_smoothing replace_module_classes set_drop_rates should_selective_backprop
        update_params_in_optimizer width_groups""",
    "trains a model, and returns numbers": "activation_changes",
    "by singular values, which are zeros here": "factorize_conv2d factorize_matrix",
    "by ids, which are zeros here": "count_documents count_real_tokens split_documents split_image_batch",
    "in test_trainer.py": "SAMOptimizer",
}
WITHOUT_TENSORS = {"check_for_index_targets", "infer_target_type"}
"""Kernels that return nothing or a word."""
SURGERY = {name for name in cf.__all__ if name.startswith("apply_")} - {"apply_gradient_clipping"}
PIXELS, FLOATS = list(DTYPES), list(DTYPES)[:2]
GROUPS = {
    "with draws passed in": (ON_PIXELS, PIXELS),
    "drawing": (WITH_DRAWS, PIXELS),
    "annotated": (ANNOTATED, PIXELS),
    "of floats": (ON_FLOATS | FLOATS_WITH_DRAWS, FLOATS),
    "of texts": (ON_TEXT, FLOATS[:1]),
}
CASES = {
    f"{name}, {group}, {dtype}": (kernel, dtype)
    for group, (kernels, dtypes) in GROUPS.items()
    for name, kernel in kernels.items()
    for dtype in dtypes
}


@pytest.mark.parametrize("case", CASES)
def test_kernel(case, step):
    """Each kernel computes and differentiates where its inputs are, without waiting for them."""
    kernel, dtype = CASES[case]
    x = kernel_inputs(DTYPES[dtype], "cuda")

    with step():
        result = kernel(x)
        backward(result)

    returns_tensors = case.partition(",")[0] not in WITHOUT_TENSORS
    assert devices(result) == ({"cuda"} if returns_tensors else set())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, dtype, step):
    """Each layer trains and evaluates."""
    make, call = LAYERS[name]
    x, module = kernel_inputs(DTYPES[dtype], "cuda"), make().to("cuda", DTYPES[dtype])
    if name == "NoisyEmbedding":
        module.noise = cf.draw_embedding_noise(x.text["input_ids"], 6).to(DTYPES[dtype])

    with step():
        backward(call(module, x))
        result = call(module.eval(), x)

    assert devices(result) == {"cuda"}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ON_MODELS)
def test_of_models(name, dtype, step):
    """Each kernel that changes gradients or weights changes them where they are."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to("cuda", DTYPES[dtype])
    backward(model(torch.rand(6, 4, device="cuda", dtype=DTYPES[dtype])))
    average = copy.deepcopy(model)

    with step():
        ON_MODELS[name](model, average)

    assert devices([(one, one.grad) for one in model.parameters()]) | devices([*average.parameters()]) == {"cuda"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("as_list", [True, False])
def test_annotations_keep_their_device(device, as_list):
    """Boxes, labels and keypoints beside images on the device are returned where they were."""
    x, where = kernel_inputs(torch.float32, "cuda"), kernel_inputs(torch.float32, device)
    boxes = where.boxes if as_list else torch.rand(8, 2, 4, device=device)

    moved = cf.augment_batch(
        x.images, PIPELINE, boxes=boxes, labels=where.classes if as_list else None, keypoints=where.keypoints
    )

    assert moved.input.is_cuda
    assert {one.device.type for one in (*moved.boxes, *moved.keypoints, *(moved.labels or ()))} == {device}


def test_each_kernel_is_here():
    """A new public kernel has a case, or a reason."""
    tables = [*(kernels for kernels, _ in GROUPS.values()), LAYERS, ON_MODELS]
    tested = {name.replace(",", "").split()[0] for table in tables for name in table}

    others = {name for names in NOT_HERE.values() for name in names.split()}
    assert not tested & others
    assert tested | others == {name for name in cf.__all__ if not name.startswith("apply_")} | {
        "apply_gradient_clipping"
    }
