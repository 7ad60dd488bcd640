// The tracing span of one call to an upstream. Its parent is the request that brought the call, which the headers of the call
// name, even if the call has waited for long or was accepted by another process.
import type { Call } from "../../core/call.ts";
import { naming, type Span, type Tracer } from "../../core/tracing.ts";
import type { Ending } from "../invocations/service.ts";

export interface SpannedCall {
  readonly tenant: string;
  readonly agentId: string;
  /** Null for a connection that is not an invocation. */
  readonly invocationId: string | null;
  readonly method: "POST" | "GET" | "DELETE";
  readonly url: string;
  readonly headers: Call["headers"];
}

export function beginCallSpan(tracer: Tracer, call: SpannedCall): Span {
  const { tenant, agentId, invocationId, method, url, headers } = call;
  // The host alone, since the path and query of a URL may hold a key.
  const host = URL.parse(url)?.hostname;
  return tracer.begin({
    kind: "client",
    name: method,
    parent: headers,
    payer: tenant,
    fields: {
      method,
      tenant,
      agentId,
      ...(host !== undefined && { host }),
      ...(invocationId !== null && { invocationId }),
    },
  });
}

/** The call with headers that name the span instead of its parent. */
export const spanned = <T extends Pick<Call, "headers">>(call: T, span: Span | null): T =>
  span === null ? call : { ...call, headers: naming(span, call.headers) };

export function endCallSpan(span: Span, { error_class, upstream_status }: Ending): void {
  // By OpenTelemetry's conventions: the status if there is one, else the error class.
  const errorType = upstream_status === null || upstream_status < 400 ? error_class : `${upstream_status}`;
  span.end({ ...(upstream_status !== null && { status: upstream_status }), ...(errorType !== null && { errorType }) });
}
