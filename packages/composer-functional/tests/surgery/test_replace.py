"""The traversal that replaces modules."""

from __future__ import annotations

import json

import torch
from torch import nn

from composer import functional as cf


def _to_gelu(module: nn.Module, index: int) -> nn.Module:
    return nn.GELU()


def _to_fresh_linear(module: nn.Linear, index: int) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features)


class Wrapped(nn.Module):
    """A layer that contains another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input)


class TestWalk:
    def test_finds_modules_at_any_depth(self):
        """Nested children are replaced, and the report has their paths."""
        model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

        report = cf.replace_module_classes(model, {nn.ReLU: _to_gelu})

        assert [entry.paths for entry in report] == [("0",), ("1.1",)]
        assert cf.count_module_instances(model, nn.ReLU) == 0
        assert cf.count_module_instances(model, (nn.GELU, nn.Linear)) == 3

    def test_most_specific_class_is_used(self):
        """A subclass is matched by its own policy, or else by its base's."""

        class Special(nn.ReLU):
            pass

        model = nn.Sequential(nn.ReLU(), Special(), nn.ReLU6())
        policies = {nn.Module: lambda module, index: None, nn.ReLU: _to_gelu, Special: lambda module, index: nn.Tanh()}

        cf.replace_module_classes(model, policies)

        assert [type(module) for module in model] == [nn.GELU, nn.Tanh, nn.ReLU6]

    def test_index_counts_each_class(self):
        """A policy receives the number of earlier instances of its class, over several walks with indices."""
        received: list[int] = []
        indices: dict[type[nn.Module], int] = {}

        def note(module: nn.Module, index: int) -> None:
            received.append(index)

        for _ in range(2):
            cf.replace_module_classes(
                nn.Sequential(nn.ReLU(), nn.Linear(1, 1), nn.ReLU()), {nn.ReLU: note}, indices=indices
            )

        assert received == [0, 1, 2, 3]
        assert indices == {nn.ReLU: 4}

    def test_none_recurses_and_same_module_does_not(self):
        """A policy can leave a module with or without its children."""

        def leave(module: Wrapped, index: int) -> nn.Module | None:
            return module if index == 0 else None

        model = nn.Sequential(Wrapped(nn.ReLU()), Wrapped(nn.ReLU()))

        report = cf.replace_module_classes(model, {Wrapped: leave, nn.ReLU: _to_gelu})

        assert [entry.paths for entry in report] == [("1.inner",)]

    def test_shared_modules_stay_shared(self):
        """A module used three times is replaced once, also inside a shared parent."""
        relu = nn.ReLU()
        parent = nn.Sequential(relu, nn.Linear(2, 2))
        model = nn.Sequential(parent, relu, parent)

        report = cf.replace_module_classes(model, {nn.ReLU: _to_gelu})

        assert model[0] is model[2]
        assert model[1] is model[0][0]
        assert [entry.paths for entry in report] == [("0.0", "1", "2.0")]

    def test_recursion_into_replacements_is_optional(self):
        """By default a wrapper's content does not change; recursion does not loop."""

        def wrap(module: nn.Sequential, index: int) -> nn.Module:
            return Wrapped(module)

        policies = {nn.Sequential: wrap, nn.ReLU: _to_gelu}
        plain, recursive = (nn.ModuleList([nn.Sequential(nn.ReLU())]) for _ in range(2))

        cf.replace_module_classes(plain, policies)
        report = cf.replace_module_classes(recursive, policies, recurse_on_replacements=True)

        assert type(plain[0].inner[0]) is nn.ReLU
        assert type(recursive[0].inner[0]) is nn.GELU
        assert [entry.paths for entry in report] == [("0",), ("0.inner.0",)]

    def test_root_is_not_replaced(self):
        """The root has no parent in which to replace it."""
        model = nn.Sequential(nn.Sequential(nn.ReLU()))

        cf.replace_module_classes(model, {nn.Sequential: lambda module, index: nn.Identity()})

        assert type(model) is nn.Sequential
        assert type(model[0]) is nn.Identity


class TestPreservedProperties:
    def test_mode_dtype_and_gradient(self, device: torch.device):
        """The new layer has the old one's mode, dtype and requires_grad."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device=device, dtype=torch.float64)
        model[0].eval()
        model[0].weight.requires_grad_(False)
        model[1].requires_grad_(False)

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear})

        assert [layer.training for layer in model] == [False, True]
        assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, False, False]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        assert {parameter.device for parameter in model.parameters()} == {next(iter(model[1].parameters())).device}

    def test_requires_grad_of_other_names(self):
        """A parameter with an unrelated name is trained if any old one was."""

        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(2))

        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        model[1].weight.requires_grad_(False)

        cf.replace_module_classes(model, {nn.Linear: lambda module, index: Scale()})

        assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]

    def test_dtype_is_that_of_the_weight(self):
        """New tensors have dtype and device of the weight; a preserved bias keeps its dtype."""
        model = nn.Sequential(*(nn.Conv2d(2, 2, 1, dtype=torch.bfloat16, device="meta") for _ in range(2)))
        for conv in model:
            conv.bias = nn.Parameter(torch.empty(2, device="meta"))

        def replace(module: nn.Conv2d, index: int) -> nn.Module:
            new = nn.Conv2d(2, 2, 1)
            if index:
                new.bias = module.bias
            return new

        cf.replace_module_classes(model, {nn.Conv2d: replace})

        assert all(parameter.is_meta for parameter in model.parameters())
        assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 3 + [torch.float32]

    def test_hooks_move_with_their_handles(self):
        """All kinds of hooks are called with the new module, and their handles remove them."""
        model = nn.Sequential(nn.Linear(2, 2))
        called: list[tuple[str, nn.Module]] = []

        def note(kind: str):
            return lambda module, *rest: called.append((kind, module))

        handles = [
            model[0].register_forward_pre_hook(note("before")),
            model[0].register_forward_hook(note("after"), with_kwargs=True),
            model[0].register_full_backward_hook(note("gradient")),
        ]

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear})
        model(torch.rand(1, 2, requires_grad=True)).sum().backward()
        new = list(called)
        for handle in handles:
            handle.remove()
        model(torch.rand(1, 2)).sum().backward()

        assert new == [("before", model[0]), ("after", model[0]), ("gradient", model[0])]
        assert called == new

    def test_state_dict_hooks_are_moved(self):
        """Saving and loading call the hooks with the new module, and their handles remove them."""
        model = nn.Sequential(nn.Linear(2, 2))
        called: list[tuple[str, nn.Module]] = []

        def note(kind: str):
            return lambda module, *rest: called.append((kind, module))

        handles = [
            model[0].register_state_dict_pre_hook(note("before saving")),
            model[0].register_state_dict_post_hook(note("after saving")),
            model[0].register_load_state_dict_pre_hook(note("before loading")),
            model[0].register_load_state_dict_post_hook(note("after loading")),
        ]

        cf.replace_module_classes(model, {nn.Linear: _to_fresh_linear})
        model.load_state_dict(model.state_dict())
        new = list(called)
        for handle in handles:
            handle.remove()
        model.load_state_dict(model.state_dict())

        kinds = ["before saving", "after saving", "before loading", "after loading"]
        assert new == [(kind, model[0]) for kind in kinds]
        assert called == new


class TestSurgeryReport:
    def test_repr_and_json(self):
        """A report prints as a list and has a JSON round trip."""
        report = cf.SurgeryReport(
            (cf.Replacement(("a", "b.c"), "Conv2d", "BlurConv2d"), cf.Replacement(("d",), "ReLU", "GELU"))
        )

        assert str(report) == "2 modules replaced\n  a, b.c: Conv2d -> BlurConv2d\n  d: ReLU -> GELU"
        assert json.loads(json.dumps(report.to_dict()))["replacements"][0]["paths"] == ["a", "b.c"]
        assert len(report) == 2

    def test_empty_is_falsy(self):
        """An empty report states that nothing was replaced."""
        assert not cf.SurgeryReport()
        assert str(cf.SurgeryReport()) == "no modules replaced"
