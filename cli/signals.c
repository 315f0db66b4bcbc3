/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ctrl-C while bytes are in flight. The handler only sets a flag; whoever waits looks at it ten times a
 * second, cancels, waits until nothing is in flight, and ends with 128 + the signal. A second signal finds
 * the default action again, so that a storage that never answers cannot hold the user.
 */
#include "work.h"

#include <signal.h>

static volatile sig_atomic_t caught;

static void on_signal(int number)
{
	caught = number;
}

void cli_signals_catch(void)
{
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};

	sigemptyset(&action.sa_mask);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
}

int cli_signals_status(void)
{
	return caught ? 128 + (int)caught : 0;
}
