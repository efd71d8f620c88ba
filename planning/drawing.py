"""The one style of all pictures, and matplotlib, which is optional. Needs no torch."""

# Mostly Okabe and Ito's, safe for the colour-blind. One for each method or kind of paths, in every
# picture.
COLOURS = {"DDP": "#000000", "DiLoCo": "#0072B2", "NoLoCo": "#D55E00", "local": "#CC79A7",
           "groups": "#8C510A", "full": "#000000", "planned": "#777777", "25%": "#009E73",
           "50%": "#882255", "random": "#E69F00"}
WIDTH = 6.6     # inches: on a phone, at 400 pixels, 10.5 points are 9 pixels high
STYLE = {"font.size": 10.5, "axes.titlesize": 10.5, "axes.titlelocation": "left",
         "axes.labelsize": 10.5, "legend.fontsize": 10.5, "figure.titlesize": 11,
         "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
         "axes.spines.right": False, "lines.markersize": 5, "savefig.dpi": 200,
         "axes.unicode_minus": False, "figure.constrained_layout.use": True}


def pyplot():
    """matplotlib.pyplot in this style, which draws to files only. Raises ImportError, whose one
    line names the extra, without matplotlib."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("no picture without matplotlib: pip install '.[plot]'")
    plt.rcParams.update(STYLE)
    return plt
