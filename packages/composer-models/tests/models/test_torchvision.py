"""Tests of composer.models.composer_torchvision."""

import pytest
import torch
import torchvision
from sklearn.datasets import load_digits
from torch.nn import functional as F

from composer.models import ComposerClassifier, ComposerDetector, ComposerSegmenter, composer_torchvision

models = torchvision.models
DIGITS = torch.tensor(load_digits().images[:64], dtype=torch.float) / 16
LABELS = torch.tensor(load_digits().target[:64])


@pytest.fixture(autouse=True)
def same_draws():
    """Seed every test."""
    torch.manual_seed(0)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Return a function that stores a random model's weights where torchvision would download them."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def put(name, **settings):
        chosen = models.get_model_weights(name).DEFAULT
        module = models.get_model(name, num_classes=len(chosen.meta["categories"]), **settings)
        folder = tmp_path / "hub" / "checkpoints"
        folder.mkdir(parents=True)
        torch.save(module.state_dict(), folder / chosen.url.rpartition("/")[2])
        return module

    return put


class TestClassification:
    def test_all_classifiers(self):
        """The requested number of classes is set in layers and metrics."""
        model = composer_torchvision("mobilenet_v3_small", num_classes=7)

        assert isinstance(model, ComposerClassifier)
        assert model(((torch.rand(2, 3, 32, 32)), None)).shape == (2, 7)
        assert model.get_metrics(is_train=True)["MulticlassAccuracy"].num_classes == 7

    @pytest.mark.parametrize(
        ("name", "options"), [("squeezenet1_0", {}), ("lraspp_mobilenet_v3_large", {"weights_backbone": None})]
    )
    def test_one_score(self, name, options):
        """One score of a sample or a pixel distinguishes two classes."""
        model = composer_torchvision(name, num_classes=1, loss_fn=torch.nn.BCEWithLogitsLoss(), **options).eval()

        scores = model((torch.rand(2, 3, 64, 64), None))
        assert (scores.shape[1], model.num_classes) == (1, 2)

    @pytest.mark.parametrize(
        ("name", "num_classes"),
        [
            *[(name, 1000) for name in ("alexnet", "densenet121", "efficientnet_b0", "googlenet", "inception_v3")],
            *[(name, 1000) for name in ("maxvit_t", "mnasnet0_5", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t")],
            *[(name, 1000) for name in ("vgg11", "vit_b_16", "convnext_tiny", "wide_resnet50_2")],
            *[(name, 400) for name in ("r3d_18", "s3d", "mvit_v1_b", "swin3d_t")],
        ],
    )
    def test_default_number_of_classes(self, name, num_classes):
        """The model and its metrics have torchvision's number of classes."""
        with torch.device("meta"):
            model = composer_torchvision(name)

        assert model.get_metrics(is_train=False)["MulticlassAccuracy"].num_classes == num_classes
        assert model.num_classes == num_classes

    @pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
    def test_no_auxiliary_heads(self, name):
        """Models with auxiliary classifiers are built without them and without a warning."""
        with torch.device("meta"):
            model = composer_torchvision(name, num_classes=3)

        assert model(((torch.empty(2, 3, 299, 299, device="meta")), None)).shape == (2, 3)

    def test_arguments_are_passed_on(self):
        """Arguments of the builder are passed to it, others to ComposerClassifier."""
        model = composer_torchvision(
            "resnet18", num_classes=10, width_per_group=64, norm_layer=torch.nn.InstanceNorm2d, val_metrics=[]
        )

        assert isinstance(model.module.bn1, torch.nn.InstanceNorm2d)
        assert model.get_metrics(is_train=False) == {}

    def test_learns_digits(self):
        """ResNet-18 learns 64 handwritten digits in a few steps; batch norms are updated in training only."""
        model = composer_torchvision("resnet18", num_classes=10)
        batch = F.interpolate(DIGITS[:, None].expand(-1, 3, -1, -1), size=32), LABELS
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []

        for _ in range(6):
            loss = model.loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        before = model.module.bn1.running_mean.clone()
        model.eval_forward(batch)

        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(model.module.bn1.running_mean, before)


class TestSegmentation:
    def test_learns_shapes(self):
        """DeepLabv3 with its auxiliary head learns to segment bright squares."""
        model = composer_torchvision(
            "deeplabv3_mobilenet_v3_large", num_classes=2, weights_backbone=None, aux_loss=True
        )
        masks = torch.zeros(2, 64, 64, dtype=torch.long)
        masks[0, 8:40, 8:40], masks[1, 24:60, 16:56] = 1, 1
        batch = masks[:, None].expand(-1, 3, -1, -1).float(), masks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []

        for _ in range(5):
            loss = model.loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        assert isinstance(model, ComposerSegmenter)
        assert sorted(model(batch)) == ["aux", "out"]
        assert losses[-1] < 0.7 * losses[0]

    @pytest.mark.parametrize("name", ["deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"])
    def test_each_family(self, name):
        """The scores have the requested classes and the images' size."""
        with torch.device("meta"):
            model = composer_torchvision(name, num_classes=4, weights_backbone=None).eval()
            scores = model((torch.empty(1, 3, 64, 64), None))

        assert scores.shape == (1, 4, 64, 64)
        assert model.num_classes == 4
        assert composer_torchvision(name, weights_backbone=None).num_classes == 21

    def test_unknown_arguments_raise(self):
        """Torchvision's builders ignore unknown arguments."""
        with pytest.raises(TypeError, match="fcn_resnet50 has no argument 'ignored_index'"):
            composer_torchvision("fcn_resnet50", 3, weights_backbone=None, ignored_index=255)


class TestDetection:
    def test_faster_rcnn(self):
        """Training gives losses and evaluation predictions, with the builder's settings."""
        model = composer_torchvision(
            "fasterrcnn_resnet50_fpn", num_classes=3, weights_backbone=None, min_size=64, max_size=64, val_metrics=[]
        )
        target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([2])}
        batch = [torch.rand(3, 64, 64)], [target]

        losses = model.loss(model(batch), batch)

        assert isinstance(model, ComposerDetector)
        assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_objectness", "loss_rpn_box_reg"]
        assert sorted(model.eval()(batch)[0]) == ["boxes", "labels", "scores"]


class TestWeights:
    @pytest.mark.parametrize("num_classes", [None, 1000])
    def test_all_weights(self, weights, num_classes):
        """With the original number of classes, all weights are loaded."""
        pretrained = weights("squeezenet1_1")

        model = composer_torchvision("squeezenet1_1", num_classes, weights="DEFAULT")

        assert model.num_classes == 1000
        torch.testing.assert_close(model.module.state_dict(), pretrained.state_dict(), rtol=0, atol=0)

    @pytest.mark.parametrize("form", ["IMAGENET1K_V1", models.MobileNet_V3_Small_Weights.IMAGENET1K_V1])
    def test_other_number_of_classes(self, weights, form):
        """Only the classification layer is initialized randomly."""
        pretrained = weights("mobilenet_v3_small").state_dict()

        module = composer_torchvision("mobilenet_v3_small", 5, weights=form).module

        changed = {name for name, value in module.state_dict().items() if not torch.equal(value, pretrained[name])}
        assert changed == {"classifier.3.weight", "classifier.3.bias"}
        assert module.classifier[3].weight.shape[0] == 5

    def test_segmentation_with_other_classes(self, weights):
        """The last layers of both heads are initialized randomly; the backbone is not loaded twice."""
        pretrained = weights("fcn_resnet50", weights_backbone=None, aux_loss=True).state_dict()

        module = composer_torchvision("fcn_resnet50", 2, weights="DEFAULT").module

        changed = {name for name, value in module.state_dict().items() if not torch.equal(value, pretrained[name])}
        assert changed == {
            f"{head}.4.{part}" for head in ("classifier", "aux_classifier") for part in ("weight", "bias")
        }

    @pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
    def test_weights_with_auxiliary_heads(self, weights, name):
        """With its own number of classes such a model has all its weights and no auxiliary heads."""
        pretrained = weights(name, init_weights=False).state_dict()

        model = composer_torchvision(name, weights="DEFAULT")

        loaded = model.module.state_dict()
        assert model.num_classes == 1000
        assert model.module.transform_input
        assert not [key for key in loaded if key.lower().startswith("aux")]
        assert all(torch.equal(value, pretrained[key]) for key, value in loaded.items())

    def test_incompatible_settings_raise(self, weights):
        """Weights that do not match raise."""
        weights("resnet50")

        with pytest.raises(ValueError, match=r"does not fit the model, which was built with other settings: layer1"):
            composer_torchvision("resnet50", 5, weights="DEFAULT", width_per_group=32)


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "suggested"),
        [
            ("resnet-18", "'resnet18'"),
            ("DeepLabV3_resnet5", "'deeplabv3_resnet50'"),
            ("faster_rcnn_resnet50_fpn", "'fast"),
        ],
    )
    def test_unknown_names(self, name, suggested):
        """The error suggests similar names."""
        with pytest.raises(ValueError, match=rf"torchvision has no model '{name}'\. Did you mean {suggested}"):
            composer_torchvision(name)

    @pytest.mark.parametrize(("old", "new"), [("pretrained", "weights"), ("pretrained_backbone", "weights_backbone")])
    @pytest.mark.parametrize("value", [True, False])
    def test_old_names(self, old, new, value):
        """Old names of torchvision raise with the new ones."""
        with pytest.raises(TypeError, match=f"{old}= is torchvision's old name; use {new}='DEFAULT', or {new}=None"):
            composer_torchvision("resnet18", **{old: value})
