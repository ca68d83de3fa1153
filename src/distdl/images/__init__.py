"""From bytes to pixels: decoders, crops, resizing, augmentation."""
