"""Lightning's loops, as subclasses: where a run must differ from what hooks of callbacks allow."""
