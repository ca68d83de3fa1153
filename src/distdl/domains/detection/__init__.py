"""Detection and instance segmentation, in the terms of COCO."""
