"""Reading of pages from crawl files, damaged ones included."""
