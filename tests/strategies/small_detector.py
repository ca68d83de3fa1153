"""A Mask R-CNN of torchvision with a hundredth of its weights, which watches what stays float32."""

from torch import float32, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

WIDTH = 16


def body():
    """From images to features of an eighth of their size."""
    layers = []
    for channels in (3, WIDTH, WIDTH):
        convolution = nn.Conv2d(channels, WIDTH, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(WIDTH), nn.ReLU()]
    sequence = nn.Sequential(*layers)
    sequence.out_channels = WIDTH
    return sequence


class Small(MaskRCNN):
    def __init__(self, num_classes, name="", backbone=None, **options):
        super().__init__(
            body(),
            rpn_anchor_generator=AnchorGenerator(((12, 24, 48),), ((0.5, 1.0, 2.0),)),
            box_roi_pool=MultiScaleRoIAlign(["0"], 7, 2),
            box_head=TwoMLPHead(WIDTH * 7**2, 32),
            box_predictor=FastRCNNPredictor(32, num_classes + 1),
            mask_roi_pool=MultiScaleRoIAlign(["0"], 14, 2),
            mask_head=MaskRCNNHeads(WIDTH, (WIDTH,), 1),
            mask_predictor=MaskRCNNPredictor(WIDTH, WIDTH, num_classes + 1),
            **options,
        )

    def forward(self, images, targets=None):
        for image in images:
            assert image.dtype == float32
        for target in targets or ():
            assert target["boxes"].dtype == float32
        answer = super().forward(images, targets)
        for each in (answer,) if self.training else answer:
            for key in each.keys() - {"labels"}:
                assert each[key].dtype == float32, key
        return answer
