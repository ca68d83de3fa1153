"""Constants for the normalisation of images."""

# Mean and standard deviation of ImageNet's red, green and blue, for values from 0 to 1.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
