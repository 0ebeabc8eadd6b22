"""What a run prints, draws and writes, except its weights.

    terminal.py     metrics.jsonl and the other files, the progress bar, warnings, a summary
    picture.py      curves.png
    html_page.py    report.html, from page.html
    model_card.py   README.md of the final weights
"""
