// The HTTP routes of receipts: one by its invocation, and the export of a tenant's receipts in the order of their chain.
import { Type } from "@sinclair/typebox";
import { routes } from "../../http/elysia.ts";
import { PAGE_QUERY, page, queryOf, shape } from "../../http/input.ts";
import { idParameter, operation } from "../../http/openapi.ts";
import { json } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import type { Receipts } from "./service.ts";

const JSON_LINES = "application/jsonl";

const Receipt = shape("Receipt", {
  receipt: Type.String({
    description:
      "A compact JWS (EdDSA). Its claims name the caller, the call, how it ended, the SHA-256 of both bodies, payment and settlement, and `previous`: the SHA-256 of the tenant's receipt before it.",
  }),
});

const EXAMPLE_JWS =
  "eyJhbGciOiJFZERTQSIsImtpZCI6IjVmMGMiLCJ0eXAiOiJyZWNlaXB0K2p3dCJ9.eyJyZWNlaXB0X2lkIjoicmNwdF8wMTlhYTRkOSJ9.c2lnbmF0dXJl";

const find = operation({
  tag: "Invocations",
  summary: "Get a trust receipt",
  description:
    "The receipt of an ended call whose agent had `emit_receipts` when the call was accepted. A paid call has one only once its payment is final. Verify it with `tollgate receipt verify`.",
  path: { id: idParameter("inv", "The invocation's ID.") },
  response: { description: "The receipt.", schema: Receipt, example: { receipt: EXAMPLE_JWS } },
  errors: ["not_found"],
});

const list = operation({
  tag: "Invocations",
  summary: "Export trust receipts",
  description:
    "Oldest first, one compact JWS per line. All pages, concatenated, are the file for `tollgate receipt verify`.",
  query: PAGE_QUERY,
  response: {
    description: "One page; empty after the last receipt.",
    mediaType: JSON_LINES,
    schema: Type.String(),
    example: `${EXAMPLE_JWS}\n`,
  },
  errors: ["invalid_request"],
});

export function receiptRoutes(receipts: Pick<Receipts, "find" | "page">) {
  return routes()
    .get(
      "/v1/invocations/:id/receipt",
      async ({ request, params }) => json("ok", { receipt: await receipts.find(scopeOf(request).caller, params.id) }),
      { detail: find },
    )
    .get(
      "/v1/receipts",
      async ({ request }) => {
        const { caller, responses } = scopeOf(request);
        const range = page(queryOf(request, list));
        return responses.respond({ tenant: caller.tenant, request, type: JSON_LINES }, async () => {
          const lines = await receipts.page(caller, range);
          return lines.map((line) => `${line}\n`).join("");
        });
      },
      { detail: list },
    );
}
