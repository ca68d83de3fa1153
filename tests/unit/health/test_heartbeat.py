"""What a rank is doing, as its watchdog and its monitor see it, by a real Trainer."""

import functools
import sys
import threading
from collections.abc import Callable

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from distdl.health import heartbeat, stacks, straggler
from distdl.health.heartbeat import PHASES, RankHeartbeat
from distdl.incident.words import BETWEEN_EPOCHS
from tests.prepared import quiet_trainer

ROWS, BATCHES = 2, 3
# Where a user's code is called: the phase, and whether it belongs to a batch.
SEEN = {
    ("prepare_data", False): "prepare_data",
    ("outside", False): "setup configure_optimizers on_fit_end",
    ("set-up", False): "train_dataloader on_train_start",
    ("callbacks", False): "on_train_epoch_start on_train_epoch_end",
    ("callbacks", True): "on_train_batch_start on_train_batch_end",
    ("data", True): "dataset",
    ("copy", True): "transfer_batch_to_device",
    ("forward", True): "training_step",
    ("backward", True): "on_before_backward",
    ("optimizer", True): "on_before_optimizer_step",
    ("validation", False): "on_validation_epoch_start on_validation_epoch_end",
    ("validation", True): "validation_step test_step predict_step",
    ("checkpoint", False): "on_save_checkpoint",
}
HOOKS = {name: {seen} for seen, names in SEEN.items() for name in names.split()}
for each in ("dataset", "transfer_batch_to_device"):
    HOOKS[each].add(("validation", True))


class Rows(RandomDataset):
    def __getitem__(self, index):
        self.note("dataset")
        return super().__getitem__(index)


class Plain(BoringModel):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.seen = {}
        self.actions = {}
        self.steps = []
        self.progress = []
        self.in_step = []  # while each row is read

    def note(self, name):
        """Called in the hook `name`: keeps what the heartbeat makes of this thread's stack."""
        frame = sys._getframe(1)
        stack = []
        while frame := frame.f_back:
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        phase, self.actions[name], in_batch = heartbeat.seen_in(stack)
        seen = ("outside" if phase is None else PHASES[phase], in_batch)
        self.seen.setdefault(name, set()).add(seen)
        if name.endswith("_step") and not name.startswith("on_"):
            self.progress.append(self.rank.progress)
        if name in ("dataset", "training_step"):
            self.rank.look(stack)
        if name == "dataset":
            self.in_step.append(self.rank.in_step)
        if name == "training_step":
            self.steps.append((heartbeat.read(self.rank.file.fileno()), self.rank.facts()))
            # The timing pauses after step 5, whose end is missing, as is the beginning of step 6.
            self.rank.time_steps(len(self.steps) != 5)

    def train_dataloader(self):
        rows = Rows(32, ROWS * BATCHES)
        rows.note = self.note
        return DataLoader(rows, batch_size=ROWS)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _noting(name):
    method = getattr(Plain, name)

    @functools.wraps(method)
    def noting(self, *args, **kwargs):
        self.note(name)
        return method(self, *args, **kwargs)

    del noting.__wrapped__  # Lightning takes it for the base's own
    return noting


Net = type("Net", (Plain,), {name: _noting(name) for name in HOOKS if name != "dataset"})


@pytest.mark.filterwarnings("ignore")
def test_what_is_seen_of_a_training(tmp_path):
    """Of three epochs, with a test and a prediction after them."""
    rank = RankHeartbeat()
    assert heartbeat.read(rank.file.fileno()) == {}
    assert rank.facts() == {"phase": "set-up", "action": "start"}
    net = Net(rank)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 2}
    trainer = quiet_trainer(tmp_path, max_epochs=3, **options)
    rank.watch(trainer)
    rank.time_steps(True)
    trainer.fit(net)
    rank.time_steps(False)
    assert not {"profile", "start"} & vars(trainer.profiler).keys(), "when it is off it is free"
    trainer.test(net, verbose=False)
    trainer.predict(net)

    assert {name: net.seen[name] for name in HOOKS} == HOOKS
    # A loader's first batch belongs to the set-up: its workers start. First two batches to try.
    epoch = [False] * ROWS + [True] * ROWS * (BATCHES - 1)
    assert net.in_step == [*epoch[: 2 * ROWS], *epoch * (3 + 3 + 1 + 1)]
    assert net.actions["on_train_epoch_end"].startswith(BETWEEN_EPOCHS)
    assert len({*net.progress}) == len(net.progress) == BATCHES * (3 + 3 + 1 + 1) + 2
    # How far it is, as its monitor reads it, and as a report has it.
    expected = [(number, *divmod(number, BATCHES)) for number in range(3 * BATCHES)]
    for (read, facts), (step, epoch, batch) in zip(net.steps, expected, strict=True):
        assert read == {"step": step, "epoch": epoch, "batch": batch + 1}
        assert facts == read | {"phase": "forward", "action": facts["action"]}
    # The phases of the steps that were timed from their begin to their end, with their times. The
    # last step of an epoch has the validation in it.
    phases = [[PHASES[phase] for phase, _ in step] for step in rank.steps]
    order = ["data", "copy", "callbacks", "forward", "backward", "optimizer", "callbacks", "data"]
    plain = [number for number, each in enumerate(phases) if each == order]
    assert (plain, len(phases)) == ([0, 1, 3, 4, 5], 6)
    assert phases[2][:7] == order[:7]
    for step in rank.steps:
        times = [time for _, time in step]
        assert times == sorted(times)
    parts = straggler.record([rank.steps[0]], [])["parts"]
    assert [part[0] for part in parts] == order[:6]


def recursive(depth: int, act: Callable[[], None]) -> None:
    if depth:
        recursive(depth - 1, act)
    else:
        act()


def looked_at(depth: int, file: str = __file__) -> list[heartbeat.Frame]:
    """The stack of this thread as another one sees it, with so many calls of a function."""
    seen: list[heartbeat.Frame] = []
    mine = stacks.ThreadStack()
    looks = threading.Thread(target=lambda: seen.extend(mine.read()))

    def look() -> None:
        looks.start()
        looks.join()

    called = {"recursive": recursive, "look": look, "depth": depth}
    exec(compile("def ends():\n    recursive(depth, look)\nends()", file, "exec"), called)
    return seen


def test_another_threads_stack_is_seen_without_objects_for_its_frames(monkeypatch) -> None:
    """Python 3.11 can block or crash where these are made."""
    monkeypatch.setattr(sys, "_current_frames", None)
    seen = looked_at(2, "/home/josé/日本/net.py")
    functions = [function for _, _, function in seen]
    at = functions.index("look")
    assert functions[at : at + 5] == ["look", *["recursive"] * 3, "ends"]
    assert seen[at + 4][:2] == ("/home/josé/日本/net.py", 2)


def test_a_very_deep_stack_keeps_the_phase() -> None:
    rank = RankHeartbeat()
    rank.phase = PHASES.index("forward")
    rank.action = "strategy.training_step"
    rank.in_step = True
    rank.look(looked_at(150))
    assert (rank.phase, rank.action) == (PHASES.index("forward"), "strategy.training_step")
    rank.look(looked_at(2))
    assert rank.phase == PHASES.index("set-up")
