"""The Mermaid diagram of a plan."""

import re
import textwrap

import pytest

from composer.core import Callback, Event, Stage, explain

NODE = re.compile(r'(\w+)(?:\["([^"`]*)"\]|\(\["([^"`]*)"\]\))')
ARROW = re.compile(r'(\w+) -->(?:\|"([^"|]+)"\|)? (\w+)')
SUBGRAPH = re.compile(r'subgraph (\w+)\["([^"]+)"\]')


def read(text):
    """Return nodes, arrows and subgraphs of a diagram, and check that there are no other lines."""
    head, *lines = text.splitlines()
    assert head == "flowchart TD"
    nodes, arrows, open_, subgraphs = {}, [], [], {}
    for line in map(str.strip, lines):
        if result := SUBGRAPH.fullmatch(line):
            open_.append(result[1])
            subgraphs[result[1]] = []
        elif line == "end":
            open_.pop()
        elif result := NODE.fullmatch(line):
            assert result[1] not in nodes
            nodes[result[1]] = result[2] or result[3]
            if open_:
                subgraphs[open_[-1]].append(result[1])
        else:
            arrows.append(ARROW.fullmatch(line).groups())
    assert open_ == []
    return nodes, arrows, subgraphs


def test_recipe(make):
    """The exact diagram of a small recipe."""
    smoothing = make.algorithm("LabelSmoothing", {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL})
    blurpool = make.algorithm("BlurPool", {Event.INIT: Stage.ARCHITECTURE})

    drawing = explain([smoothing, blurpool], make.callback("Watch", "before_loss")).to_mermaid()

    assert drawing == textwrap.dedent("""\
        flowchart TD
            at_init["init<br/>BlurPool (architecture)"]
            subgraph epochs["every epoch"]
                subgraph batches["every batch"]
                    do_take_a_batch(["take a batch"])
                    subgraph microbatches["every microbatch"]
                        do_forward_pass(["forward pass"])
                        at_before_loss["before_loss<br/>LabelSmoothing (label)<br/>Watch (callback)"]
                        do_loss(["loss"])
                        at_after_loss["after_loss<br/>LabelSmoothing (label)"]
                        do_backward_pass(["backward pass"])
                    end
                    do_optimizer_step(["optimizer step"])
                end
            end
            at_init --> do_take_a_batch
            do_take_a_batch --> do_forward_pass
            do_backward_pass --> do_optimizer_step
            do_forward_pass --> at_before_loss
            at_before_loss --> do_loss
            do_loss --> at_after_loss
            at_after_loss --> do_backward_pass
            do_backward_pass -->|"next microbatch"| do_forward_pass
            do_optimizer_step -->|"next batch"| do_take_a_batch
            do_optimizer_step -->|"next epoch"| do_take_a_batch""")


@pytest.mark.parametrize("event", Event)
def test_every_event_is_drawn(make, event):
    """Each event is drawn once, and connected by an arrow."""
    nodes, arrows, _ = read(explain(make.algorithm("A", {event: Stage.LOSS})).to_mermaid())

    assert nodes[f"at_{event.value}"] == f"{event.value}<br/>A (loss)"
    assert any(f"at_{event.value}" in (source, target) for source, _, target in arrows)


def test_diagram_is_connected(make):
    """With a component at each event, arrows connect nodes in the loop's order."""
    halves = [make.algorithm(str(place), dict.fromkeys([*Event][place::2], Stage.LOSS)) for place in range(2)]

    nodes, arrows, subgraphs = read(explain(halves).to_mermaid())

    assert {source for source, _, _ in arrows} | {target for _, _, target in arrows} == set(nodes)
    forward = [(source, target) for source, label, target in arrows if label is None]
    assert ("at_before_forward", "do_forward_pass") in forward
    assert ("at_fit_start", "at_iteration_start") in forward
    assert ("at_iteration_checkpoint", "at_fit_end") in forward
    assert len(forward) == len(set(forward)) == len(nodes) - 3  # three drawings, each a line without a gap
    assert subgraphs["microbatches"][0] == "at_before_forward"
    assert {label for _, label, _ in arrows} - {None} == {
        "next microbatch",
        "next batch",
        "next epoch",
        "next data set",
    }


def test_evaluation_only(make):
    """Phases without calls are not drawn."""
    nodes, _, subgraphs = read(explain([], make.callback("C", "eval_end")).to_mermaid())

    assert set(nodes) == {"do_forward_pass_of_an_evaluation", "at_eval_end"}
    assert set(subgraphs) == {"evaluations", "evaluated"}


def test_components_of_all_events_have_one_box(make):
    """Components of all events have one box."""

    class Recorder(Callback):
        def run_event(self, event, state, logger):
            pass

    nodes, arrows, _ = read(explain(make.algorithm("Matching", match=lambda *_: True), Recorder()).to_mermaid())

    assert (nodes, arrows) == ({"everywhere": "at every event<br/>Matching<br/>Recorder"}, [])


def test_empty_plan():
    """An empty plan gives an empty diagram."""
    assert explain([]).to_mermaid() == "flowchart TD"


def test_names_are_escaped(make):
    """Characters with a meaning in Mermaid or HTML are escaped."""
    algorithm = make.algorithm('A"<b>&#1;`', {Event.INIT: Stage.LAYOUT})

    nodes, _, _ = read(explain(algorithm).to_mermaid())

    assert nodes["at_init"] == "init<br/>A#quot;#lt;b#gt;#amp;#35;1#59;#96; (layout)"
