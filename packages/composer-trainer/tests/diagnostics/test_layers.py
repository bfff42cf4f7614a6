"""The summary of a model."""

from composer.diagnostics import summary
from fixtures import small_run


class TestLayers:
    def test_paths_classes_and_shapes(self):
        """Each layer has its name, its class, the shape of its output, and its parameters."""
        table = summary(small_run())

        layers = [(one.var_name, one.class_name, one.output_size, one.num_params) for one in table.summary_list]
        assert layers == [
            ("ComposerClassifier", "ComposerClassifier", [4, 3], 67),
            ("module", "Sequential", [4, 3], 67),
            ("0", "Linear", [4, 8], 40),
            ("1", "ReLU", [4, 8], 0),
            ("2", "Linear", [4, 3], 27),
        ]
        assert "Linear (2)" in str(table)

    def test_frozen_parameters(self):
        """They are counted apart."""
        trainer = small_run()
        trainer.state.model.module[0].bias.requires_grad_(False)

        table = summary(trainer)

        assert (table.total_params, table.trainable_params) == (67, 59)

    def test_compiled_model(self):
        """The layers of a compiled model are shown."""
        assert "Linear (2)" in str(summary(small_run(compile_config={"backend": "eager"})))
