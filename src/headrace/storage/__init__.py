"""Open files, and what the page cache holds of them."""
