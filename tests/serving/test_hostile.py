"""`distdl serve` under images that want to keep it busy: each is refused by a sentence, and the
next photograph is answered as before. CI sends a few; DISTDL_MATRIX=1 all, and takes the time."""

import os
import statistics
import time
from concurrent import futures

import pytest

from distdl.tools.serving.batching import DECODERS
from tests.conftest import UNCHECKED
from tests.serving import hostile
from tests.serving.colours import Server, photo, write_model

MATRIX = os.environ.get("DISTDL_MATRIX") == "1"
FEW = ("JPEG of 20,000 scans", "PNG with a text of 64 MB", "TIFF with a JPEG of 5,000 scans")
PHOTO = photo("blue", size=(500, 375))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture
def server(model, background):
    started = background("serve", str(model), "serve.port=0", module=UNCHECKED)
    started.until(lambda: "stop    " in started.output())
    port = int(started.output().split("serve   http://127.0.0.1:")[1].split()[0])
    return Server(started.process, port)


def answered(server):
    """The seconds until a photograph is answered; the median of five."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        code, content = server.score(PHOTO)
        seconds.append(time.perf_counter() - started)
        assert code == 200
        assert content["predictions"][0]["class"] == "blue"
    return statistics.median(seconds)


def test_after_a_hostile_image_the_next_photograph_is_answered(server):
    answered(server)  # the first is slower
    slow = []
    for name, (make, expected, sentence) in hostile.IMAGES.items():
        if not (MATRIX or name in FEW):
            continue
        data = make()
        for _ in range(3):  # of which one must do, since the machine has other work
            before = answered(server)
            with futures.ThreadPoolExecutor(2 * DECODERS) as pool:
                started = time.perf_counter()
                sent = [pool.submit(server.score, data) for _ in range(DECODERS)]
                answers = [each.result() for each in sent]
                taken = time.perf_counter() - started
            after = answered(server)
            for code, content in answers:
                assert code == expected, (name, content)
                assert sentence in content["error"], (name, content)
            if not MATRIX or after < 3 * before:
                break
        else:
            slow.append(name)
        ms = f"{1e3 * before:6.1f} {1e3 * after:6.1f} {1e3 * taken:7.0f}"
        print(f"{name:48}{len(data) / 1e6:6.1f} MB {expected} {ms} ms", flush=True)
    assert not slow
    assert server.ask("GET", "/ping")[0] == 200


def test_large_images_hold_up_no_ordinary_photograph(server):
    large = hostile.flat(7000, 7000, "PNG")  # as many pixels as are allowed
    with futures.ThreadPoolExecutor(2 * DECODERS + 1) as pool:
        sent = [pool.submit(server.score, large) for _ in range(2 * DECODERS + 1)]
        while server.health()["queue"] <= DECODERS:
            time.sleep(0.01)
        answered(server)
        assert not all(each.done() for each in sent)
        assert {each.result()[0] for each in sent} == {200}
