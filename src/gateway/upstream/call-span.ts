// The span of one call to an upstream. Its parent is what the headers of the call name: the request that brought it, also
// when the call waited for long, or when another process accepted it.
import type { Call } from "../../core/call.ts";
import { naming, type Span, type Tracer } from "../../core/tracing.ts";
import type { Ending } from "../invocations/service.ts";

export interface SpannedCall {
  readonly tenant: string;
  readonly agentId: string;
  /** Null for a connection that is no invocation. */
  readonly invocationId: string | null;
  readonly method: "POST" | "GET" | "DELETE";
  readonly url: string;
  readonly headers: Call["headers"];
}

export function beginCallSpan(tracer: Tracer, call: SpannedCall): Span {
  const { tenant, agentId, invocationId, method, url, headers } = call;
  return tracer.begin({
    kind: "client",
    name: method,
    parent: headers,
    payer: tenant,
    fields: {
      method,
      tenant,
      agentId,
      ...hostOf(url),
      ...(invocationId !== null && { invocationId }),
    },
  });
}

/** The call with the span in its headers in the place of its parent. */
export function spanned<T extends Pick<Call, "headers">>(call: T, span: Span | null): T {
  return span === null ? call : { ...call, headers: naming(span, call.headers) };
}

export function endCallSpan(span: Span, { error_class, upstream_status }: Ending): void {
  // As the conventions have it: the status where there is one.
  const errorType = upstream_status === null || upstream_status < 400 ? error_class : `${upstream_status}`;
  span.end({
    ...(upstream_status !== null && { status: upstream_status }),
    ...(errorType !== null && { errorType }),
  });
}

/** Nothing else of the URL: its path and query may hold a key. */
function hostOf(url: string): { readonly host?: string } {
  const host = URL.parse(url)?.hostname;
  return host === undefined ? {} : { host };
}
