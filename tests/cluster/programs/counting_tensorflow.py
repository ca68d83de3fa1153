"""TensorFlow's MultiWorkerMirroredStrategy by a loop of its own, which saves and continues."""

import os
import signal
import sys
import tempfile

import tensorflow as tf

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = strategy.cluster_resolver.task_type == "chief"
with strategy.scope():
    weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    step = tf.Variable(0, dtype=tf.int64)
saved = tf.train.Checkpoint(weight=weight, step=step)
folder = os.environ["DISTDL_CHECKPOINTS"]
newest = tf.train.latest_checkpoint(folder)
if newest:
    saved.restore(newest)
# All tasks call save, and only the chief's is kept.
manager = tf.train.CheckpointManager(saved, folder if chief else tempfile.mkdtemp(), max_to_keep=2)


@tf.function
def train(ends):
    def one(ends):
        weight.assign_sub(0.1 * weight)
        # A tensor of this device: an argument is of none.
        return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(ends))

    return strategy.run(one, args=(ends,))


first = int(step.numpy())
print("from step", first, flush=True)
for _ in range(first, int(sys.argv[1])):
    ends = strategy.experimental_local_results(train(tf.constant(float(bool(asked)))))[0]
    step.assign_add(1)
    manager.save()
    if float(ends):
        sys.exit(75)
print("done", flush=True)
