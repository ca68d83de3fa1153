"""The model outside its run: model folders, exports, the server, and endpoints."""
