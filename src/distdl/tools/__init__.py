"""Tools that no training needs: the core never imports them."""
