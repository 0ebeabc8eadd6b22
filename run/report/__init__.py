"""What a run prints, plots and writes to its folder, besides weights.

    terminal.py     the progress bar, warnings, a summary; metrics.jsonl and other files
    picture.py      curves.png
    html_page.py    report.html, from page.html
    model_card.py   README.md of the final weights
"""
