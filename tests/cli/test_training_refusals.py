"""What a fine-tuning, a recompute, an optimizer or a mesh cannot do is said on the real command
line: one message, exit code 2, nothing started and no file written."""

import pytest
import torch
from torchvision.models import resnet18

from tests.conftest import distdl, matrix_only
from tests.unit.sample_config import check_parts, rows

# What is typed | what is read, part after part.
TYPED = """
# The classes of head and data.
model.num_classes=5 | model.num_classes: is 5, and the data have 10 classes | model.num_classes=10
model.network.num_classes=5 | model.network.num_classes: is 5, and the data have 10 classes
{taken} model.num_classes=20 model.network.num_classes=30 | model.head: no layer of ResNet has 20 \
outputs, as a head of 20 classes has | model.num_classes outputs
model.head=new | model.head: has no effect without model.weights | model.weights=FILE
# What is frozen.
model.freeze=[layr1.*] | model.freeze: | 'layr1.*' | layer1
model.freeze=[backbon] | model.freeze: ResNet has no module or parameter \
'backbon' | did you mean backbone
model.freeze=["*"] | model.freeze: nothing is left to train in ResNet | model.freeze=[backbone]
model.unfreeze_at=3 | model.unfreeze_at: has no effect without model.freeze
# Weights.
model.weights=nowhere.pth | model.weights: no such file: nowhere.pth
model.network._target_=torchvision.models.resnet50 model.weights=five.pth | model.weights: \
five.pth holds the weights of another network than ResNet | choose the model that the weights
model.network._target_=torchvision.models.mobilenet_v3_small {taken} \
~model.network.zero_init_residual | model.weights: five.pth holds the weights of another network
model.weights=torchvision:resnet19 | model.weights: torchvision has no weights 'resnet19'
# Recompute.
+model.recompute=[network.layr1.*] | model.recompute: no layer of ImageClassifier | network.layer1
+model.recompute=al | model.recompute: is 'al' | none, blocks
model=classifier \
model.network={_target_:torchvision.ops.MLP,in_channels:3072,hidden_channels:[10]} \
+model.recompute=blocks | model.recompute: ImageClassifier has no blocks
# Optimizers that know layers.
optimizer=muon strategy=deepspeed_zero1 trainer.devices=2 | strategy: Muon computes something of \
whole layers, and ZeRO shows it parts of them | strategy=ddp or strategy=fsdp
optimizer=lars strategy=deepspeed_zero3 trainer.devices=2 | strategy: Lars computes something of
optimizer=schedulefree schedule=cosine | optimizer: AdamWScheduleFree averages the weights
# The degrees of a strategy.
strategy=pipeline strategy.stages=3 trainer.devices=4 | strategy.stages: 3 stages do not divide
strategy=model_parallel trainer.devices=4 strategy.tensor_parallel_size=3 | tensor_parallel_size: \
3 ranks in each group do not divide the 4 devices | strategy.tensor_parallel_size=2 or 4
strategy=model_parallel trainer.devices=2 | strategy: ImageClassifier does not parallelise \
itself | self.device_mesh["data_parallel"] | docs/strategies/model_parallel.md
""".replace("\\\n", "")
SMALL = (
    "model=resnet18",
    "data=synthetic",
    "data.num_classes=10",
    "data.image_size=32",
    "data.batch_size=8",
    "trainer.accelerator=cpu",
    "tracking=none",
)


@matrix_only
@pytest.mark.parametrize(("typed", "parts"), rows(TYPED))
def test_one_message_and_nothing_starts(typed, parts, tmp_path):
    torch.save(resnet18(num_classes=5).state_dict(), tmp_path / "five.pth")
    words = typed.replace("{taken}", "model.weights=five.pth model.head=new").split()
    done = distdl(*SMALL, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("distdl: 1 problem, nothing was started\n"), done.stderr
    check_parts(" ".join(done.stderr.split()), parts)
    assert [*tmp_path.iterdir()] == [tmp_path / "five.pth"]
