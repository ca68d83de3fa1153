"""What test_campaign trains on a mesh; copied into a project's folder."""

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distdl.models import ImageClassifier


class Meshed(ImageClassifier):
    """Around `mine.network`, of which it divides the last two linear layers."""

    divided = False

    def configure_model(self) -> None:
        super().configure_model()
        mesh = self.device_mesh
        if mesh is None or self.divided:
            return
        self.divided = True
        plan = {"5": ColwiseParallel(), "7": RowwiseParallel()}
        parallelize_module(self.network, mesh["tensor_parallel"], plan)
        fully_shard(self, mesh=mesh["data_parallel"])
