"""The head whose logits are computed when they are used."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from composer import functional as cf
from composer.functional.transformers_loss import logits_of


@pytest.fixture
def head():
    torch.manual_seed(0)
    return cf.ChunkedHead(5, 7, chunk_size=2).double()


@pytest.fixture
def hidden():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)


IDS = torch.tensor([[0, 1, 2, 3], [4, 5, -100, 6], [1, -100, 3, 2]])

LOSSES = {
    "rows": lambda logits: cross_entropy(logits.view(-1, 7), IDS.view(-1)),
    "next tokens": lambda logits: cross_entropy(logits[:, :-1].reshape(-1, 7), IDS[:, 1:].flatten()),
    "an ellipsis": lambda logits: cross_entropy(logits[..., :-1, :].flatten(0, 1), IDS[:, 1:].flatten()),
    "a mask": lambda logits: cross_entropy(logits[IDS != -100], IDS[IDS != -100]),
    "one sample": lambda logits: cross_entropy(logits[1], IDS[1], reduction="sum", label_smoothing=0.1),
    "losses": lambda logits: cross_entropy(logits.view(-1, 7), IDS.view(-1), reduction="none").square().sum(),
    "a scale by keyword": lambda logits: cross_entropy(torch.mul(input=logits, other=0.5).view(-1, 7), IDS.view(-1)),
    "a divisor by keyword": lambda logits: cross_entropy(torch.div(input=logits, other=2.0).view(-1, 7), IDS.view(-1)),
    "a scale": lambda logits: cross_entropy((2 * logits / 3).mul(0.5).view(-1, 7), IDS.view(-1)),
    "a limit": lambda logits: cross_entropy(((logits / 2).tanh() * 2).view(-1, 7), IDS.view(-1)),
    "a negative limit": lambda logits: cross_entropy(((logits / 2).tanh() * -2).view(-1, 7), IDS.view(-1)),
    "a cast": lambda logits: cross_entropy(logits.double().to(torch.float64).contiguous()[0], IDS[0]),
    "probabilities": lambda logits: cross_entropy(logits.reshape(12, -1), torch.full((12, 7), 0.1).double()),
    "a copy": lambda logits: cross_entropy(logits.clone().view(12, 7), IDS.view(-1)),
}


class TestDeferred:
    @pytest.mark.parametrize("name", LOSSES)
    def test_loss_without_logits(self, head, hidden, name):
        """Loss and gradients are those of all logits, which are not computed: that would give a warning."""
        loss = LOSSES[name](head(hidden))
        right = LOSSES[name](linear(hidden, head.weight, head.bias))

        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad(one, (hidden, head.weight, head.bias)) for one in (loss, right))
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)

    def test_z_loss_is_added_where_gradients_are_enabled(self, head, hidden):
        """The z-loss is part of the training loss, and not of a metric."""
        head.z_loss = 0.1
        logits = linear(hidden, head.weight, head.bias).view(-1, 7)
        counts = IDS.view(-1) != -100

        loss = LOSSES["rows"](head(hidden))
        with torch.no_grad():
            metric = LOSSES["rows"](head(hidden))

        right = cross_entropy(logits, IDS.view(-1))
        torch.testing.assert_close(metric, right.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(loss, right + 0.1 * logits.logsumexp(1).square()[counts].mean(), rtol=1e-12, atol=0)

    def test_autocast_is_that_of_the_head(self, head, hidden):
        """A loss outside of autocast uses the 16-bit products of the head."""
        head, hidden = head.float(), hidden.detach().float()
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(hidden)
            right = linear(hidden, head.weight, head.bias)

        assert logits.dtype is torch.bfloat16
        torch.testing.assert_close(LOSSES["rows"](logits), LOSSES["rows"](right.float()), rtol=1e-6, atol=1e-6)

    def test_compiled_model(self, head, hidden):
        """A compiled model has the same loss and gradients."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = head

            def forward(self, hidden):
                return LOSSES["next tokens"](self.head(hidden))

        model = Model()
        right = torch.autograd.grad(model(hidden), head.weight)

        loss = torch.compile(model, backend="aot_eager")(hidden)

        torch.testing.assert_close(torch.autograd.grad(loss, head.weight), right)


OTHERS = {
    "log_softmax": lambda logits: logits.log_softmax(-1)[..., 0].sum(),
    "a function": lambda logits: torch.cat([logits, logits], 1).square().sum(),
    "operators": lambda logits: ((1 - (logits + 1)) ** 2).sum(),
    "properties": lambda logits: logits.mT.square().sum() / logits.numel() * logits.size(0) * len(logits),
}


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.7 takes each compilation for an export")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo reads
class TestCompiled:
    """A head of a model that computes its loss in ``forward``."""

    @pytest.mark.parametrize("name", sorted((LOSSES | OTHERS).keys() - {"a mask"}))  # whose shape depends on data
    def test_one_graph(self, head, hidden, name):
        """Loss and gradients are those of all logits, in one graph, also of operations that need them."""
        head.has_loss_in_forward = True
        call = (LOSSES | OTHERS)[name]
        torch.compiler.reset()

        loss = torch.compile(lambda x: call(head(x)), backend="eager", fullgraph=True)(hidden)

        right = call(linear(hidden, head.weight, head.bias))
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad(one, (hidden, head.weight, head.bias)) for one in (loss, right))
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)

    def test_lengths_share_a_graph(self, head):
        """Batches of other lengths, with other numbers of chunks, need one further graph, as of other models."""
        head.has_loss_in_forward = True
        graphs = []
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x, ids: cross_entropy(head(x), ids), backend=lambda graph, _: graphs.append(graph) or graph
        )

        for length in (3, 4, 6, 9):
            compiled(torch.rand(length, 5).double(), torch.zeros(length, dtype=torch.long))

        assert len(graphs) == 2

    def test_logits_after_the_graph(self, head, hidden):
        """Logits that leave the graph are used as those of a head that is not compiled, and cannot be changed."""
        head.has_loss_in_forward = True

        outputs = torch.compile(lambda x: {"logits": head(x)}, backend="eager", fullgraph=True)(hidden)

        logits = logits_of(outputs)
        assert isinstance(logits, torch.Tensor)
        torch.testing.assert_close(LOSSES["rows"](logits), LOSSES["rows"](linear(hidden, head.weight, head.bias)))
        torch.testing.assert_close(LOSSES["rows"](outputs["logits"]), LOSSES["rows"](logits))
        with pytest.raises(RuntimeError, match="'add_' cannot change them"):
            outputs["logits"].add_(1)
        with pytest.raises(RuntimeError, match="'__setitem__' cannot change them"):
            outputs["logits"][0] = 1


class TestComputed:
    def test_graph_has_the_parameters(self, head, hidden):
        """In the graph of logits DistributedDataParallel finds the parameters that a step uses."""
        logits = head(hidden)[:, -1].float()  # holds the graph, of which torch 2.7 needs all for next_functions
        found, nodes = set(), [logits.grad_fn]
        while nodes:
            node = nodes.pop()
            found.add(id(getattr(node, "variable", None)))
            nodes += [one for one, _ in node.next_functions if one is not None]

        assert found >= {id(head.weight), id(head.bias), id(hidden)}

    def test_other_operations_are_right(self, head, hidden):
        """Operations that need logits compute them; without gradients there is no warning."""
        right = linear(hidden, head.weight, head.bias).detach()
        with torch.no_grad():
            logits = head(hidden)

            assert torch.equal(logits.argmax(-1), right.argmax(-1))
            assert torch.equal(logits[..., 0], right[..., 0])
            assert torch.equal(logits.view(-1), right.view(-1))
            assert torch.equal(logits.detach().cpu(), right)
            assert torch.equal(logits * 0, right * 0)
            assert torch.equal(logits[(right > 0).numpy()], right[right > 0])
            assert torch.equal(logits.reshape(shape=(12, 7)), right.view(12, 7))
            assert torch.equal(logits.to(torch.float32, True), right.float())
            assert torch.equal(torch.empty_like(right).copy_(logits), right)
            assert torch.equal(torch.stack([logits, logits]), torch.stack([right, right]))
            torch.testing.assert_close(
                cross_entropy(logits.movedim(-1, 1), IDS), cross_entropy(right.movedim(-1, 1), IDS)
            )

    def test_logits_with_gradients_give_a_warning(self, head, hidden):
        """A loss that needs all logits has right gradients, and names the operation in a warning."""
        with pytest.warns(UserWarning, match="All logits of a ChunkedHead are computed for 'log_softmax'"):
            loss = head(hidden).log_softmax(-1)[..., 0].sum()

        right = linear(hidden, head.weight, head.bias).log_softmax(-1)[..., 0].sum()
        torch.testing.assert_close(*(torch.autograd.grad(one, head.weight) for one in (loss, right)))

    @pytest.mark.parametrize(
        "change", [lambda one: one.mul_(2), lambda one: one.__setitem__(0, 0.0), lambda one: one.__itruediv__(2)]
    )
    def test_changes_in_place_raise(self, head, hidden, change):
        """Logits that are not stored cannot be changed in place."""
        with pytest.raises(RuntimeError, match="cannot change them"):
            change(head(hidden))

    def test_evaluation_returns_logits(self, head, hidden):
        """In evaluation the logits are a plain tensor, limited by softcap."""
        head.softcap = 0.5

        logits = head.eval()(hidden)

        assert type(logits) is torch.Tensor
        assert torch.equal(logits, 0.5 * torch.tanh(linear(hidden, head.weight, head.bias) / 0.5))

    def test_export_in_training_mode(self, head, hidden):
        """An exported graph has a linear layer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(head, (hidden.detach(),)).module()

        assert torch.equal(exported(hidden.detach()), linear(hidden, head.weight, head.bias))
