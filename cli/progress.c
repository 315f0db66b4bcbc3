/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The progress bar: bytes, rate, time left. Drawn at most ten times a second, only on a terminal, and taken
 * away again before anything else is said.
 */
#include "work.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define INTERVAL_NS UINT64_C(90000000)
#define WIDEST_BAR  40

void cli_progress_start(struct cli_progress *progress, const char *verb)
{
	const char *term = getenv("TERM");

	*progress = (struct cli_progress){.verb = verb, .start_ns = cli_now_ns()};
	progress->is_on = isatty(STDERR_FILENO) && (!term || strcmp(term, "dumb") != 0);
}

static int terminal_columns(void)
{
	struct winsize size;

	if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
		return size.ws_col;
	return 80;
}

static void draw_bar(int width, double share)
{
	int full = (int)(share * width);

	putc('[', stderr);
	for (int i = 0; i < width; i++)
		putc(i < full ? '#' : ' ', stderr);
	fputs("] ", stderr);
}

static void draw(const struct cli_progress *progress, uint64_t done, uint64_t total, uint64_t now)
{
	double share = total ? (double)done / (double)total : 1;
	double seconds = (double)(now - progress->start_ns) / 1e9;
	double rate = seconds > 0 ? (double)done / seconds : 0;
	char text[96];
	int n = snprintf(text, sizeof(text), "%3.0f %%  %.2f of %.2f GB  %.2f GB/s", share * 100, (double)done / 1e9,
			 (double)total / 1e9, rate / 1e9);

	if (rate > 0 && done < total)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "  %.0f s left", (double)(total - done) / rate);

	int room = terminal_columns() - n - (int)strlen(progress->verb) - 6;

	fprintf(stderr, "\r%s ", progress->verb);
	if (room >= 5)
		draw_bar(room < WIDEST_BAR ? room : WIDEST_BAR, share);
	fprintf(stderr, "%s\033[K", text);
	fflush(stderr);
}

void cli_progress_show(struct cli_progress *progress, uint64_t done, uint64_t total)
{
	uint64_t now;

	if (!progress || !progress->is_on)
		return;
	now = cli_now_ns();
	if (progress->is_drawn && now - progress->last_ns < INTERVAL_NS)
		return;
	draw(progress, done, total, now);
	progress->is_drawn = true;
	progress->last_ns = now;
}

void cli_progress_end(struct cli_progress *progress)
{
	if (!progress || !progress->is_drawn)
		return;
	fputs("\r\033[K", stderr);
	fflush(stderr);
	progress->is_drawn = false;
}
