// Starts Swagger UI in the reader's browser. Endpoints of other servers are shown but can't be tried: the page calls only the
// gateway that it came from. Lines of JSON are shown as text: by itself the page shows nothing of a type that it does not know.
const isHere = (state, path, method) => {
  const servers = state.getIn(["json", "paths", path, method, "servers"]);
  return servers === undefined || servers.some((server) => server.get("url") === "/");
};

const OwnServerOnly = {
  statePlugins: {
    spec: { wrapSelectors: { allowTryItOutFor: () => isHere } },
  },
};

const linesAsText = async (response) => {
  const { data, headers } = response;
  if (!(data instanceof Blob) || !headers["content-type"]?.startsWith("application/jsonl")) return response;
  const text = await data.text();
  return { ...response, data: text, text, headers: { ...headers, "content-type": "text/plain" } };
};

SwaggerUIBundle({
  url: "swagger/json",
  dom_id: "#swagger-ui",
  // Keeps the page from sending the document's address to a public validator.
  validatorUrl: null,
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  // A token stays in the page's memory: the browser's storage would keep it after the page is closed.
  persistAuthorization: false,
  plugins: [OwnServerOnly],
  responseInterceptor: linesAsText,
});
