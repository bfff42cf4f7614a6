"""A trainer in a real notebook kernel: the bar, interrupts, and what cells show."""

import re
import warnings
from types import SimpleNamespace

import pytest

BEGIN = """
import time, torch
from composer import Trainer
from composer.algorithms import LabelSmoothing
from composer.models import ComposerClassifier

def make_trainer(**options):
    torch.manual_seed(1)
    network = torch.nn.Linear(4, 3)
    data = [(torch.rand(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(20)]
    return Trainer(
        model=ComposerClassifier(network), train_dataloader=data, eval_dataloader=data, algorithms=LabelSmoothing(0.1),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1), max_duration="2ep", device="cpu", seed=1, **options,
    )

def interrupted_at(trainer, batch):
    def ready(state, logger):
        time.sleep(0.05)
        if int(state.timestamp.batch) == batch:
            print("interrupt", flush=True)
    return trainer.engine.on("batch_end", ready)

expected = make_trainer(run_name="first", progress_bar=False)
expected.fit()
trainer = make_trainer(run_name="second")
waiting = interrupted_at(trainer, 10)
"""
CELLS = {
    "begin": BEGIN,
    "interrupted": "trainer.fit()",
    "trainer": "trainer",
    "eval": "waiting.remove()\nprint(len(trainer.predict(trainer.state.train_dataloader)), *trainer.eval())",
    "continued": "trainer.fit()",
    "equal": "print(torch.equal(trainer.state.model.module.weight, expected.state.model.module.weight))",
    "longer": 'trainer.fit(duration="1ep")',
    "other rate": 'trainer.state.optimizers[0].param_groups[0]["lr"] = 0.01\ntrainer.fit(duration="1ep")',
    "part": 'waiting = interrupted_at(trainer, 85)\ntrainer.fit(duration="1ep")',
    "part continued": "waiting.remove()\ntrainer.fit()",
    "complete": "trainer.fit()",
    "other run": 'make_trainer(run_name="third", precision="amp_bf16").fit()',
}


def run_cell(manager, client, code):
    """Run a cell, interrupt the kernel where it prints so, and return what it shows."""
    shown = SimpleNamespace(stdout="", stderr="", html="", error=None, bars=[])
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=120)
        content = message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
            if content["text"].startswith("interrupt\n"):
                manager.interrupt_kernel()
        elif message["msg_type"] == "execute_result":
            shown.html = content["data"].get("text/html", "")
        elif message["msg_type"] == "error":
            shown.error = content
        elif message["msg_type"] == "comm_msg":
            shown.bars.append(content["data"].get("state", {}).get("value"))
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return shown


@pytest.fixture(scope="module")
def cells():
    """What each cell of a notebook shows, by name."""
    client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's client, about its connection
        manager, channels = client.manager.start_new_kernel(kernel_name="python3")
        try:
            yield {name: run_cell(manager, channels, code) for name, code in CELLS.items()}
        finally:
            channels.stop_channels()
            manager.shutdown_kernel(now=True)


def rows(html):
    """Return the rows of all tables as lists of their cells."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


@pytest.mark.slow
class TestKernel:
    def test_bar_redraws(self, cells):
        """One bar of the fit grows in place, and no line is written for its batches."""
        counts = [value for value in cells["interrupted"].bars if isinstance(value, float)]

        assert len({*counts}) >= 3
        assert counts == sorted(counts)
        assert "%|" not in cells["interrupted"].stdout + cells["interrupted"].stderr

    def test_interrupt_ends_the_cell_with_a_sentence(self, cells):
        """The sentence states how to continue, and there is no traceback."""
        shown = cells["interrupted"]

        assert (shown.error["ename"], shown.error["traceback"]) == ("KeyboardInterrupt", ["KeyboardInterrupt"])
        assert re.search(
            r"The training was stopped by SIGINT after batch \d+\. fit\(\) of this Trainer continues it\.", shown.stderr
        )
        assert "start the program" not in shown.stderr

    def test_trainer_after_an_interrupt(self, cells):
        """It shows the curve so far, the interrupted call, and what the algorithm did."""
        html = cells["trainer"].html
        (call,) = [row for row in rows(html) if "stopped by SIGINT" in row]
        batches = int(call[0].removeprefix("0 to "))

        assert 10 <= batches < 20
        assert f"batch 1 to {batches}" in html
        assert len(re.findall("[ML]", re.search(r'<path d="(.*?)"', html)[1])) == batches
        assert call[1] == "SGD 0.1"
        assert ["LabelSmoothing", f"{batches} batches"] in rows(html)

    def test_usable_after_an_interrupt(self, cells):
        """It predicts and evaluates, and fit completes the training with the weights of one without an interrupt."""
        assert cells["eval"].stdout.endswith("20 eval\n")
        assert ["ended", "max_duration=&#x27;2ep&#x27; is reached"] in rows(cells["continued"].html)
        assert cells["equal"].stdout == "True\n"

    def test_further_calls(self, cells):
        """Each call of fit shows its own curve and steps."""
        assert "batch 41 to 60" in cells["longer"].html
        assert ["learning rate", "SGD 0.1"] in rows(cells["longer"].html)
        assert "new since" not in cells["longer"].html

    def test_other_learning_rate(self, cells):
        """The result names the rate that was changed between two calls, and what it was."""
        assert ["new since the last fit", "optimizers/SGD/lr 0.1 → 0.01"] in rows(cells["other rate"].html)
        assert ["learning rate", "SGD 0.01"] in rows(cells["other rate"].html)

    def test_part_is_completed(self, cells):
        """After an interrupt of a part behind max_duration, fit completes this part, once."""
        assert cells["part"].error["ename"] == "KeyboardInterrupt"
        assert ["ended", "max_duration=&#x27;5ep&#x27; is reached"] in rows(cells["part continued"].html)
        assert ["ended", "max_duration=&#x27;5ep&#x27; was reached before"] in rows(cells["complete"].html)

    def test_other_run(self, cells):
        """The result of another trainer names what differs from the last run of the notebook."""
        (changed,) = [row[1] for row in rows(cells["other run"].html) if row[0] == "new since run second"]

        assert "precision fp32 → amp_bf16" in changed
        assert "optimizers/SGD/lr 0.01 → 0.1" in changed
