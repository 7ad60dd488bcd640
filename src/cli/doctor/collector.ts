// The collector of traces, sent a request without a span. Whatever is wrong with it, calls go on, so it only warns.
import type { TracingOptions } from "../../core/tracing-options.ts";
import { createOutbound, OutboundError } from "../../http/outbound.ts";
import { createCollectorRequest, NoAnswer } from "../../tracing/exporter.ts";
import { CHECK_MS_MAX, type Finding, findings, observed, type Problem, problemOf, warning } from "./findings.ts";

/** Less than the check may take, so that it tells of this by itself. */
const ANSWER_MS_MAX = CHECK_MS_MAX - 500;
/** What a request without a span is as protobuf. */
const NO_SPANS = new Uint8Array();
const ENDPOINT =
  "OTEL_EXPORTER_OTLP_ENDPOINT must be its base URL for OTLP over HTTP, and this machine must reach it: spans are dropped";

/** Of its URL only the host is told: the path may hold a key. */
export async function collectorFindings({ endpoint, headers, extraCa }: TracingOptions): Promise<Finding[]> {
  const server = observed(createOutbound({ rules: null, extraCa }));
  const request = createCollectorRequest({ endpoint, headers, outbound: server.outbound });
  const problem = await problemIn(request);
  const problems = [problem, server.certificateProblem()].map((each) => each && warning(each.text, each.advice));
  return findings("trace collector", problems, `${new URL(endpoint).host} takes spans`);
}

async function problemIn(request: ReturnType<typeof createCollectorRequest>): Promise<Problem | null> {
  const late = AbortSignal.timeout(ANSWER_MS_MAX);
  try {
    return statusProblem((await request(NO_SPANS, late)).status);
  } catch (error) {
    if (late.aborted) return warning(`no answer within ${ANSWER_MS_MAX / 1000} s`, ENDPOINT);
    if (!(error instanceof NoAnswer)) throw error;
    return error.cause instanceof OutboundError ? problemOf(error.cause, ENDPOINT) : warning(error.message, ENDPOINT);
  }
}

function statusProblem(status: number): Problem | null {
  if (status >= 200 && status <= 299) return null;
  const text = `it answers ${status}`;
  if (status === 401 || status === 403) {
    return warning(text, "OTEL_EXPORTER_OTLP_HEADERS must name a key that it takes: spans are dropped");
  }
  const isBusy = status === 429 || status >= 500;
  return warning(text, isBusy ? "see to the collector: spans that it does not take are dropped" : ENDPOINT);
}
