"""A rank is never ended by the look at what it does."""

import pytest

from distdl.health import stacks
from tests.conftest import python

# As gloo's threads are for some nanoseconds while they begin to free a tensor. `cframe` is the
# first field of a thread's state that points into the state itself.
UNFINISHED_THREAD = """
import ctypes, threading
from distdl.health.stacks import ThreadStack

api = ctypes.pythonapi
api.PyInterpreterState_Get.restype = api.PyThreadState_New.restype = ctypes.c_void_p
state = api.PyThreadState_New(ctypes.c_void_p(api.PyInterpreterState_Get()))
words = (ctypes.c_void_p * 40).from_address(state)
words[[state < (word or 0) < state + 1000 for word in words].index(True)] = None

def look(mine):
    print(mine.read()[-1])

mine = ThreadStack()
other = threading.Thread(target=look, args=(mine,))
other.start()
other.join()
"""


@pytest.mark.skipif(not stacks.LISTS_UNFINISHED, reason="this Python lists complete threads only")
def test_a_thread_that_begins_is_not_looked_at(tmp_path):
    done = python("-c", UNFINISHED_THREAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<module>" in done.stdout
