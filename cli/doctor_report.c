/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the doctor says: one page of text, or one JSON object. The verdicts are made here, from the table of checks.
 */
#include "bench.h"
#include "doctor.h"
#include "json_writer.h"

#include <inttypes.h>
#include <string.h>

const char *doctor_caching_name(uint32_t caching)
{
	static const char *const names[] = {"auto", "fill", "bypass"};

	return names[caching];
}

/* ---- text ---- */

/* Prints words in lines of 100 columns, indented; control bytes are escaped. */
static void put_wrapped(const char *text, unsigned indent, unsigned at)
{
	while (*text) {
		size_t len = strcspn(text, " ");
		size_t width = cli_name_width(text, len);

		if (at > indent && at + 1 + width > 100) {
			printf("\n%*s", (int)indent, "");
			at = indent;
		} else if (at > indent) {
			putchar(' ');
			at++;
		}
		cli_put_name(stdout, text, len);
		at += (unsigned)width;
		text += len;
		text += strspn(text, " ");
	}
	putchar('\n');
}

static void put_check(const struct doctor_check *check, const struct doctor_finding *finding)
{
	printf("%-5s %-12s ", doctor_verdict_name(finding->verdict), check->id);
	put_wrapped(finding->reason, 19, 19);
	if (finding->advice[0]) {
		printf("%*s-> ", 19, "");
		put_wrapped(finding->advice, 22, 22);
	}
}

static const char *yes_no(const struct doctor_engine *engine, uint32_t caching)
{
	if (!engine->is_usable)
		return "no";
	if (!engine->is_known[caching])
		return "-";
	return engine->works[caching] ? "yes" : "no";
}

static void put_engines(const struct doctor *d)
{
	printf("\n%-8s %-7s %-7s %-7s %s\n", "ENGINE", "USABLE", "FILL", "BYPASS", "HOW, OR WHY NOT");
	for (size_t i = 0; i < d->n_engines; i++) {
		const struct doctor_engine *engine = &d->engines[i];

		printf("%-8s %-7s %-7s %-7s ", engine->name, engine->is_usable ? "yes" : "no",
		       yes_no(engine, HR_CACHING_FILL), yes_no(engine, HR_CACHING_BYPASS));
		put_wrapped(engine->reason, 33, 33);
		for (uint32_t way = HR_CACHING_FILL; way <= HR_CACHING_BYPASS; way++) {
			if (!engine->why[way][0])
				continue;
			printf("%*s%s:", 33, "", doctor_caching_name(way));
			put_wrapped(engine->why[way], 35, 34 + (unsigned)strlen(doctor_caching_name(way)));
		}
	}
}

static void put_series(const struct doctor_series *series)
{
	struct bench_spread rate = doctor_rate(series);
	char pinned[32];

	printf("%-5s %-8s %-7s ", series->is_cold ? "cold" : "warm", series->engine,
	       doctor_caching_name(series->caching));
	if (!series->n) {
		put_wrapped(series->error[0] ? series->error : "no time was left", 22, 22);
		return;
	}
	printf("%8.2f %8.2f %8.2f %8zu %10.3f %10s%s\n", rate.median, rate.min, rate.max, series->n, doctor_cpu(series),
	       cli_human(pinned, series->pinned_bytes),
	       series->is_prepared ? "" : "  (the page cache was not as it should be)");
}

static void put_trial(const struct doctor *d)
{
	char sample[32];

	printf("\nTrial: %s of the model, %.1f s. GB/s without setting up; cold: dropped from the page cache before.\n",
	       cli_human(sample, d->trial.sample_bytes), d->trial.seconds);
	printf("%-5s %-8s %-7s %8s %8s %8s %8s %10s %10s\n", "STATE", "ENGINE", "CACHING", "MEDIAN", "MIN", "MAX",
	       "ROUNDS", "CPU-s/GB", "PINNED");
	for (size_t i = 0; i < d->trial.n; i++)
		put_series(&d->trial.series[i]);
}

/* A name as a word for a shell. */
static void put_word(FILE *out, const char *word)
{
	if (word[0] &&
	    !word[strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:+,@%=-")]) {
		fputs(word, out);
		return;
	}
	putc('\'', out);
	for (; *word; word++) {
		if (*word == '\'')
			fputs("'\\''", out);
		else
			putc(*word, out);
	}
	putc('\'', out);
}

/* The best setting needs a permission that was given to the doctor too. */
static bool is_compat(const struct doctor *d)
{
	return d->best_engine && strcmp(d->best_engine, "cufile") == 0 && d->args->cufile &&
	       strcmp(d->args->cufile, "compat") == 0;
}

static char *load_line(const struct doctor *d)
{
	char *text = NULL;
	size_t len = 0;
	FILE *out = open_memstream(&text, &len);

	if (!out)
		return cli_text("headrace load");
	fputs("headrace load", out);
	for (size_t i = 0; i < d->args->n_names; i++) {
		putc(' ', out);
		put_word(out, d->args->names[i]);
	}
	fprintf(out, " --device %s", d->facts.device.spec);
	if (d->best_engine)
		fprintf(out, " --engine %s", d->best_engine);
	if (is_compat(d))
		fputs(" --cufile compat", out);
	if (d->best_caching != HR_CACHING_AUTO)
		fprintf(out, " --caching %s", doctor_caching_name(d->best_caching));
	fclose(out);
	return text ? text : cli_text("headrace load");
}

/* What --model-loader-extra-config takes; NULL: nothing need be said. */
static char *vllm_config(const struct doctor *d)
{
	if (!d->best_engine && d->best_caching == HR_CACHING_AUTO)
		return NULL;
	if (!d->best_engine)
		return cli_text("{\"caching\": \"%s\"}", doctor_caching_name(d->best_caching));
	return cli_text("{\"engine\": \"%s\"%s%s%s%s}", d->best_engine, is_compat(d) ? ", \"cufile\": \"compat\"" : "",
			d->best_caching != HR_CACHING_AUTO ? ", \"caching\": \"" : "",
			d->best_caching != HR_CACHING_AUTO ? doctor_caching_name(d->best_caching) : "",
			d->best_caching != HR_CACHING_AUTO ? "\"" : "");
}

/* Empty for a model in a store: vLLM needs the folder. */
static char *vllm_line(const struct doctor *d)
{
	char *config = vllm_config(d), *text = NULL;
	size_t len = 0;
	FILE *out = open_memstream(&text, &len);

	if (out && cli_is_store(d->args->names[0])) {
		fclose(out);
	} else if (out) {
		fputs("vllm serve ", out);
		put_word(out, d->args->names[0]);
		fputs(" --load-format headrace", out);
		if (config)
			fprintf(out, " --model-loader-extra-config '%s'", config);
		fclose(out);
	}
	cli_free(config);
	return text ? text : cli_text("vllm serve");
}

static void put_best(const struct doctor *d)
{
	char *load = load_line(d), *vllm = vllm_line(d);

	printf("\nbest           ");
	cli_put_name(stdout, load, strlen(load));
	printf("\n               (%s)\n", d->best_why);
	if (vllm[0]) {
		printf("with vLLM      ");
		cli_put_name(stdout, vllm, strlen(vllm));
		putchar('\n');
	}
	cli_free(load);
	cli_free(vllm);
}

static bool judge_text(const struct doctor *d)
{
	unsigned counts[4] = {0};

	for (const struct doctor_check *check = doctor_checks; check->id; check++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		check->judge(&d->facts, &finding);
		counts[finding.verdict]++;
		if (d->args->n_names || !check->is_of_model)
			put_check(check, &finding);
	}
	put_engines(d);
	if (d->trial.n)
		put_trial(d);
	if (d->facts.has_model)
		put_best(d);
	printf("\n%u ok, %u to look at, %u that will not work\n", counts[DOCTOR_OK], counts[DOCTOR_WARN],
	       counts[DOCTOR_FAIL]);
	return counts[DOCTOR_FAIL] == 0;
}

/* ---- JSON ---- */

static void json_way(struct cli_json *json, const struct doctor_engine *engine, uint32_t way)
{
	if (!engine->is_known[way])
		return;
	cli_json_object(json, doctor_caching_name(way));
	cli_json_bool(json, "works", engine->works[way]);
	cli_json_text(json, "reason", engine->why[way]);
	cli_json_end(json);
}

static void json_engines(struct cli_json *json, const struct doctor *d)
{
	cli_json_array(json, "engines");
	for (size_t i = 0; i < d->n_engines; i++) {
		const struct doctor_engine *engine = &d->engines[i];

		cli_json_object(json, NULL);
		cli_json_text(json, "name", engine->name);
		cli_json_bool(json, "usable", engine->is_usable);
		cli_json_text(json, "reason", engine->reason);
		json_way(json, engine, HR_CACHING_FILL);
		json_way(json, engine, HR_CACHING_BYPASS);
		cli_json_end(json);
	}
	cli_json_end(json);
}

static void json_series(struct cli_json *json, const struct doctor_series *series)
{
	struct bench_spread rate = doctor_rate(series);

	cli_json_object(json, NULL);
	cli_json_text(json, "state", series->is_cold ? "cold" : "warm");
	cli_json_text(json, "engine", series->engine);
	cli_json_text(json, "caching", doctor_caching_name(series->caching));
	cli_json_u64(json, "rounds", series->n);
	if (series->n) {
		bench_spread_json(json, "gb_per_second", &rate);
		cli_json_real(json, "cpu_seconds_per_gb", doctor_cpu(series));
		cli_json_u64(json, "peak_pinned_bytes", series->pinned_bytes);
		cli_json_u64(json, "peak_staging_bytes", series->staging_peak_bytes);
		cli_json_bool(json, "prepared", series->is_prepared);
	}
	cli_json_text(json, "error", series->error);
	cli_json_end(json);
}

static void json_trial(struct cli_json *json, const struct doctor *d)
{
	cli_json_object(json, "trial");
	cli_json_u64(json, "sample_bytes", d->trial.sample_bytes);
	cli_json_real(json, "seconds", d->trial.seconds);
	cli_json_array(json, "series");
	for (size_t i = 0; i < d->trial.n; i++)
		json_series(json, &d->trial.series[i]);
	cli_json_end(json);
	cli_json_end(json);
}

static void json_best(struct cli_json *json, const struct doctor *d)
{
	char *load = load_line(d), *vllm = vllm_line(d), *config = vllm_config(d);

	cli_json_object(json, "best");
	cli_json_text(json, "engine", d->best_engine ? d->best_engine : "auto");
	cli_json_text(json, "caching", doctor_caching_name(d->best_caching));
	cli_json_text(json, "why", d->best_why);
	cli_json_text(json, "command", load);
	cli_json_text(json, "vllm_command", vllm);
	cli_json_text(json, "vllm_extra_config", config ? config : "{}");
	cli_json_end(json);
	cli_free(load);
	cli_free(vllm);
	cli_free(config);
}

static bool json_checks(struct cli_json *json, const struct doctor *d)
{
	bool is_well = true;

	cli_json_array(json, "checks");
	for (const struct doctor_check *check = doctor_checks; check->id; check++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		check->judge(&d->facts, &finding);
		is_well &= finding.verdict != DOCTOR_FAIL;
		cli_json_object(json, NULL);
		cli_json_text(json, "id", check->id);
		cli_json_text(json, "what", check->what);
		cli_json_text(json, "verdict", doctor_verdict_name(finding.verdict));
		cli_json_text(json, "reason", finding.reason);
		cli_json_text(json, "advice", finding.advice);
		cli_json_end(json);
	}
	cli_json_end(json);
	return is_well;
}

static bool judge_json(const struct doctor *d)
{
	struct cli_json json;
	bool is_well;

	cli_json_start(&json, stdout);
	is_well = json_checks(&json, d);
	json_engines(&json, d);
	cli_json_array(&json, "devices");
	for (size_t i = 0; i < d->n_rows; i++) {
		if (strcmp(d->rows[i].kind, "device") != 0)
			continue;
		cli_json_object(&json, NULL);
		cli_json_text(&json, "name", d->rows[i].name);
		cli_json_bool(&json, "usable", d->rows[i].usable);
		cli_json_text(&json, "reason", d->rows[i].reason);
		cli_json_end(&json);
	}
	cli_json_end(&json);
	if (d->trial.n)
		json_trial(&json, d);
	if (d->facts.has_model)
		json_best(&json, d);
	cli_json_bool(&json, "ok", is_well);
	cli_json_finish(&json);
	return is_well;
}

/* What failed is told on stderr as well, as every failure is. */
static void tell_failures(const struct doctor *d)
{
	const char *before = "headrace: this will not work: ";

	fflush(stdout);
	for (const struct doctor_check *check = doctor_checks; check->id; check++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		check->judge(&d->facts, &finding);
		if (finding.verdict != DOCTOR_FAIL)
			continue;
		fprintf(stderr, "%s%s", before, check->id);
		before = ", ";
	}
	putc('\n', stderr);
}

bool doctor_report(const struct doctor *d)
{
	bool is_well = d->args->json ? judge_json(d) : judge_text(d);

	if (!is_well)
		tell_failures(d);
	return is_well;
}
